"""Low-rank adapters: their size, the merged network, and runs that train them."""

import copy
import shutil
from dataclasses import replace
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from facetrain.backbone.low_rank import LowRankUpdate, add_adapters, merge_adapters, trained_share
from facetrain.backbone.settings import LoraSettings
from facetrain.backbone.vit import VisionTransformer
from facetrain.backbone.zoo import build_backbone
from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import load_config
from facetrain.errors import ConfigError, ModelError
from facetrain.models.embedding_model import open_model
from facetrain.models.inference_network import inference_network
from tests.support import training

CPU = torch.device("cpu")
TINY = {"layers": (1, 1, 1, 1), "widths": (4, 4, 6, 8), "embedding_size": 8, "image_size": 16}
NETWORKS = {
    "iresnet": lambda: build_backbone("iresnet", **TINY),
    "mbf_small": lambda: build_backbone("mbf_small", embedding_size=8, image_size=32),
    "vit": lambda: VisionTransformer(16, 2, drop_path=0.0, embedding_size=8, image_size=18),
}
SIDES = {"iresnet": 16, "mbf_small": 32, "vit": 18}


def with_random_adapters(network, rank=3):
    add_adapters(network, LoraSettings(rank=rank, alpha=1.5))
    with torch.no_grad():
        for name, value in network.named_parameters():
            if name.endswith(".0.up"):
                value.normal_(0, 0.3)
    return network


@pytest.mark.parametrize(
    ("name", "dtype", "limit"),
    [
        *[(name, torch.float32, 1e-6) for name in NETWORKS],
        # A ViT computes its last norm in float32 in any case.
        *[(name, torch.float64, 1e-12) for name in ("iresnet", "mbf_small")],
    ],
)
def test_the_merged_network_gives_the_embeddings_of_the_adapted_one(name, dtype, limit):
    torch.manual_seed(0)
    plain = NETWORKS[name]().to(dtype)
    adapted = with_random_adapters(copy.deepcopy(plain)).eval()
    image_BCHW = torch.randn(3, 3, SIDES[name], SIDES[name], dtype=dtype)
    before = plain.eval()(image_BCHW)
    expected = adapted(image_BCHW)
    plain.load_state_dict(merge_adapters(adapted.state_dict(), "x"))
    difference = (plain(image_BCHW) - expected).norm() / expected.norm()
    assert difference <= limit and (before - expected).norm() / expected.norm() > 1e-3


def test_the_verification_folds_the_updated_weights():
    torch.manual_seed(0)
    adapted = with_random_adapters(NETWORKS["iresnet"]()).eval()
    image_BCHW = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        folded, expected = inference_network(adapted, CPU)(image_BCHW), adapted(image_BCHW)
    assert (folded - expected).norm() / expected.norm() < 1e-5


def test_an_update_has_the_rank_and_starts_at_zero():
    torch.manual_seed(0)
    weight = torch.randn(12, 10, 3, 3, dtype=torch.float64)
    update = LowRankUpdate(weight, 4, 0.5)
    assert torch.equal(update(weight), weight)
    with torch.no_grad():
        update.up.normal_()
    change = update(weight) - weight
    for matrix in (change.flatten(1), change.transpose(0, 1).flatten(1)):
        assert torch.linalg.matrix_rank(matrix, rtol=1e-9) == 4
    dense = torch.zeros_like(weight)
    for a in range(4):
        for b in range(4):
            dense += 0.5 * torch.einsum("o,hw,i->oihw", update.up[:, a], update.core[a, b], update.down[b])
    torch.testing.assert_close(change, dense)


@pytest.mark.parametrize(("rank", "trained"), [(4, 206_874), (8, 427_290)])
def test_adapters_of_an_r50_have_less_than_a_hundredth_of_its_parameters(rank, trained):
    with torch.device("meta"):
        network = build_backbone("r50")
    whole = sum(value.numel() for value in network.parameters())
    add_adapters(network, LoraSettings(rank=rank))
    assert sum(value.numel() for value in network.parameters() if value.requires_grad) == trained
    assert trained_share(network) == trained / whole <= 0.01


def test_only_targets_get_adapters_and_all_else_is_frozen():
    network = NETWORKS["iresnet"]()
    add_adapters(network, LoraSettings(rank=2, targets=("layer3", "fc")))
    trained = {
        name.split(".parametrizations")[0] for name, p in network.named_parameters() if p.requires_grad
    }
    assert trained == {"fc", "layer3.0.conv1", "layer3.0.conv2", "layer3.0.downsample.0"}
    assert not any(
        module.training for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)
    )
    with pytest.raises(ConfigError, match=r"model\.lora\.targets: .*'bn1'"):
        add_adapters(NETWORKS["iresnet"](), LoraSettings(rank=2, targets=("bn1",)))


@pytest.mark.parametrize(
    "normed", [nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm], ids=["parametrized", "hooked"]
)
def test_a_layer_that_computes_its_weight_takes_no_adapter(normed):
    network = nn.Sequential(normed(nn.Linear(4, 4)), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"model\.lora\.targets: 0 computes its weight"):
        add_adapters(network, LoraSettings(rank=2))
    add_adapters(network, LoraSettings(rank=2, targets=("1",)))


def test_queries_and_values_are_updated_and_keys_are_not():
    torch.manual_seed(0)
    network = VisionTransformer(64, 2, drop_path=0.0, embedding_size=8, image_size=18)
    plain = {name: value.clone() for name, value in network.state_dict().items()}
    add_adapters(network, LoraSettings(rank=3, projections=("q", "v")), new_layers=("feature.",))
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    parts = [
        f"blocks.{block}.attn.qkv.parametrizations.weight.0.parts.{part}.{name}"
        for block, part, name in product("01", "qv", ("up", "down"))
    ]
    assert trained == {
        *parts,
        *(name for name, _ in network.named_parameters() if name.startswith("feature.")),
    }
    for name, parameter in network.named_parameters():
        if name.endswith(".up"):
            nn.init.normal_(parameter)
    merged = merge_adapters(network.state_dict(), "test")
    assert merged.keys() == plain.keys()
    for block in network.blocks:
        update = block.attn.qkv.parametrizations.weight[0].parts
        change = [
            update[part].up @ update[part].down if part in "qv" else torch.zeros(64, 64) for part in "qkv"
        ]
        original = block.attn.qkv.parametrizations.weight.original
        torch.testing.assert_close(block.attn.qkv.weight - original, torch.cat(change), rtol=0, atol=1e-5)
    changed = {name for name in plain if not torch.equal(merged[name], plain[name])}
    assert changed == {"blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"}
    image = torch.randn(2, 3, 18, 18)
    expected = network.eval()(image)
    loaded = VisionTransformer(64, 2, drop_path=0.0, embedding_size=8, image_size=18).eval()
    loaded.load_state_dict(merged)
    torch.testing.assert_close(loaded(image), expected)


def test_a_network_without_attentions_has_no_projections():
    with pytest.raises(ConfigError, match=r"model\.lora\.projections"):
        add_adapters(NETWORKS["iresnet"](), LoraSettings(rank=2, projections=("q",)))


class Attention(nn.Module):
    head_first = True

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)


@pytest.mark.parametrize(
    ("targets", "words"),
    [(("1",), "no layer of model.lora.targets is one"), ((), r"0\.qkv has its rows by head")],
)
def test_projections_that_no_layer_has_or_that_are_not_thirds_of_its_rows_are_refused(targets, words):
    network = nn.Sequential(Attention(), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=rf"model\.lora\.projections: .*{words}"):
        add_adapters(network, LoraSettings(rank=2, projections=("q",), targets=targets))


def test_autocast_does_not_round_the_update():
    network = with_random_adapters(NETWORKS["iresnet"]())
    plain = network.fc.weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(network.fc.weight, plain) and network.layer1[0].conv1.weight.dtype == torch.float32


@pytest.fixture(scope="module")
def tuned(dataset, tmp_path_factory):
    """The folder of a run, `first`, and of one that adapts it, `tuned`, and the config of the latter."""
    folder = tmp_path_factory.mktemp("lora")
    adapted = {"init_from": f"{folder}/first", "lora": {"rank": 2, "alpha": 4}}
    sections = {"optim": {"lr": 0.05}, "train": {"max_steps": 4}, "checkpoint": {"every_steps": 2}}
    for name, model in (("first", {}), ("tuned", adapted)):
        config = load_config(training.write_tiny_config(folder, dataset, name=name, model=model, **sections))
        assert training.train(config, folder / name) == 0
    return folder, config


def test_a_run_trains_the_adapters_alone_and_exports_merged_weights(tuned):
    folder, _ = tuned
    first, merged = (load_file(folder / name / "model.safetensors") for name in ("first", "tuned"))
    assert first.keys() == merged.keys()
    changed = {name for name in first if not torch.equal(first[name], merged[name])}
    assert changed == {name for name, value in first.items() if "conv" in name or "downsample.0" in name} | {
        "fc.weight"
    }
    saved = Checkpoint.open(folder / "tuned").replicated("backbone.")
    for name, value in first.items():
        original = name.replace(".weight", ".parametrizations.weight.original")
        assert torch.equal(saved[original if original in saved else name], value), name
    assert "with adapters of rank 2 (" in (folder / "tuned" / "log.txt").read_text()


def test_a_checkpoint_with_adapters_opens_as_the_model_file_of_its_run(tuned):
    folder = tuned[0] / "tuned"
    file = load_file(folder / "model.safetensors")
    opened = open_model(folder / "checkpoints" / "step_00000004", CPU).network.state_dict()
    assert file.keys() == opened.keys() and all(torch.equal(file[name], opened[name]) for name in file)


def test_adapters_resume_bit_for_bit_and_their_checkpoint_can_be_fine_tuned(tuned, tmp_path):
    folder, config = tuned
    expected = (folder / "tuned" / "model.safetensors").read_bytes()
    assert training.resume(config, folder / "tuned", 2) == 0
    assert (folder / "tuned" / "model.safetensors").read_bytes() == expected
    text = (
        (folder / "tuned.yaml")
        .read_text()
        .replace(f"{folder}/first", f"{folder}/tuned/checkpoints/step_00000004")
    )
    (tmp_path / "again.yaml").write_text(text)
    assert (
        training.train(load_config(tmp_path / "again.yaml", ["train.max_steps=1"]), tmp_path / "again") == 0
    )


@pytest.mark.parametrize(
    ("run", "keys", "message"),
    [
        ("tuned", ["model.lora.rank=3"], "was trained with .*'rank': 2"),
        ("tuned", ["model.lora=null"], "'rank': 2.*, and cannot continue with null; keep"),
        (
            "first",
            ["model.init_from={}/first", "model.lora={{rank: 4}}"],
            "was trained with null, .*'rank': 4",
        ),
    ],
)
def test_a_run_continues_neither_with_other_adapters_nor_with_added_or_removed_ones(
    tuned, run, keys, message
):
    folder = tuned[0]
    config = load_config(folder / f"{run}.yaml", [key.format(folder) for key in keys])
    with pytest.raises(ConfigError, match=rf"model\.lora: .*{message}"):
        training.resume(config, folder / run)


def test_a_checkpoint_of_a_version_without_the_key_continues(tuned, tmp_path):
    run = shutil.copytree(tuned[0] / "first", tmp_path / "first")
    checkpoint = Checkpoint.open(run)
    meta = copy.deepcopy(checkpoint.meta)
    del meta["model"]["config"]["model"]["lora"]
    (checkpoint.folder / "manifest.json").write_text(replace(checkpoint.manifest, meta=meta).dump())
    assert training.resume(load_config(tuned[0] / "first.yaml", ["train.max_steps=5"]), run) == 0


CRAFTED = {
    "no inner side": lambda t: t.pop("conv1.parametrizations.weight.0.up"),
    "another output": lambda t: t.update({"fc.parametrizations.weight.0.up": torch.zeros(9, 2)}),
    "a core of other taps": lambda t: t.update(
        {"conv1.parametrizations.weight.0.core": torch.zeros(2, 2, 1, 3)}
    ),
    "a scale for each output": lambda t: t.update({"fc.parametrizations.weight.0.scale": torch.ones(8)}),
    "two inner sides": lambda t: t.update({"fc.parametrizations.weight.0.down": torch.zeros(3, 8)}),
}


@pytest.mark.parametrize("crafted", CRAFTED)
def test_an_adapter_that_does_not_fit_is_refused(crafted):
    state = with_random_adapters(NETWORKS["iresnet"](), 2).state_dict()
    CRAFTED[crafted](state)
    with pytest.raises(ModelError, match=r"^x: .*(conv1|fc)"):
        merge_adapters(state, "x")


@pytest.mark.parametrize(
    ("keys", "message"),
    [("lora: {}", "lora needs init_from"), ("lora: {}, init_from: x, freeze: [fc]", "freeze cannot be combined")],
)  # fmt: skip
def test_adapters_need_a_model_and_freeze_all_of_it(tmp_path, keys, message):
    (tmp_path / "a.yaml").write_text(f"data: {{train: x}}\nmodel: {{{keys}}}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "a.yaml")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, weight):
        return self.scale * weight


def test_other_parametrizations_of_a_network_stay_as_they_are():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    network = nn.Sequential(
        nn.utils.parametrizations.weight_norm(layers[0]),
        nn.utils.parametrizations.spectral_norm(layers[1]),
        layers[2],
        nn.utils.parametrize.register_parametrization(nn.Linear(4, 4), "weight", Scaled()),
    )
    state = network.state_dict()
    merged = merge_adapters(state, "x")
    assert merged.keys() == state.keys() and all(merged[name] is state[name] for name in state)
