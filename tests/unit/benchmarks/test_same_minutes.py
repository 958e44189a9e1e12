"""The recipes that `benchmarks.same_minutes` compares, and what it keeps of them, without training."""

from benchmarks import same_minutes
from benchmarks.arcface_torch_training import NETWORK
from benchmarks.same_minutes import ARMS
from facetrain.backbone.zoo import build_backbone
from facetrain.config.loading import load_config
from facetrain.run.parts.backbone import describe_model
from tests.support.command import ROOT


def test_all_recipes_train_the_same_network():
    expected = build_backbone(**NETWORK, image_size=32).state_dict()
    for arm in ARMS.values():
        if arm.config:
            config = load_config(ROOT / arm.config, ["data.image_size=32"])
            found = build_backbone(**describe_model(config)["backbone"]).state_dict()
            assert {key: value.shape for key, value in found.items()} == {
                key: value.shape for key, value in expected.items()
            }


def test_a_kept_training_of_other_settings_is_done_again(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(same_minutes, "_run_module", lambda command: commands.append(command) or 1.0)
    monkeypatch.setattr(same_minutes, "_ROOT", tmp_path)
    config = tmp_path / ARMS["facetrain"].config
    config.parent.mkdir(parents=True)
    for size, seed in ((32, 1), (32, 1), (112, 1), (112, 2)):
        config.write_text(f"data: {{train: faces}}\nseed: {seed}")
        trainer = same_minutes._Trainer(tmp_path / "data", tmp_path, size)
        (tmp_path / "facetrain_4_lfw.json").touch()
        trainer.train("facetrain", 4)
    assert len(commands) == 3 and not (tmp_path / "facetrain_4_lfw.json").exists()
