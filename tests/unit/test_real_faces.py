"""The recipes on real faces and their runner, without training."""

import json
import runpy
import shutil
from pathlib import Path

import pytest

from facetrain.backbone.zoo import build_backbone
from facetrain.config.loading import load_config
from facetrain.run.parts.backbone import describe_model
from tests.support.command import ROOT
from tests.support.command_lines import complaint

FOLDER = ROOT / "recipes" / "real_faces"


@pytest.fixture(scope="module")
def runner():
    return runpy.run_path(str(FOLDER / "run.py"))


def test_every_config_of_the_folder_loads_and_is_run(runner):
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(runner["RECIPES"])
    for recipe in runner["RECIPES"]:
        assert load_config(FOLDER / f"{recipe}.yaml").run.name == recipe


def test_the_compatible_network_learns_the_old_centers_and_the_labels():
    old, new = (load_config(ROOT / "recipes" / "compatible" / f"{name}.yaml") for name in ("old", "new"))
    assert new.distill.loss == "fixed_centers" and new.distill.margin_weight == 1
    assert new.distill.teacher == f"{old.run.dir}/{old.run.name}"
    # The projection of another size would not be in the model file; one seed would give both the same first weights.
    assert new.model.embedding_size == old.model.embedding_size and new.seed != old.seed


@pytest.mark.parametrize("recipe", ["labels", "distilled", "shallow_labels", "shallow"])
def test_the_small_network_has_at_most_half_a_million_parameters(recipe):
    network = build_backbone(**describe_model(load_config(FOLDER / f"{recipe}.yaml"))["backbone"])
    assert sum(parameter.numel() for parameter in network.parameters()) <= 500_000


@pytest.mark.parametrize(
    ("of_labels", "of_teacher", "sections"),
    [("labels", "distilled", {"run", "distill"}), ("shallow_labels", "shallow", {"run", "head", "distill"})],
)
def test_a_distilled_network_differs_from_the_one_trained_on_labels_in_the_loss_only(
    of_labels, of_teacher, sections
):
    labels, distilled = (
        load_config(FOLDER / f"{name}.yaml").model_dump() for name in (of_labels, of_teacher)
    )
    assert {key for key in labels if labels[key] != distilled[key]} == sections


def test_every_step_is_a_command_of_facetrain(runner):
    made = list(runner["steps"](Path("data/real"), Path("out"), runner["RECIPES"], [1, 2]))
    assert len(made) == 3 + 2 * (2 * len(runner["RECIPES"]) + 1)
    assert [reason for step in made if (reason := complaint(step.arguments, complete=True))] == []
    trainings = [step for step in made if step.arguments[0] == "train"]
    # A second call continues an interrupted run, in the folder that is evaluated.
    assert {(*step.arguments[3:6],) for step in trainings} == {
        ("--run-dir", str(step.output.parent), "--resume") for step in trainings
    }
    words = {word for step in trainings for word in step.arguments}
    assert {"seed=1", "seed=2", "distill.cache=out/teacher.safetensors"} <= words
    evaluations = [step.arguments for step in made if step.output.name == "distilled_2.json"]
    (averaged,) = (step.arguments for step in made if step.output.name == "small_faces_1.safetensors")
    assert averaged[1:3] == ["out/small_faces_1", "data/real/y1/model-symbol.json"]
    assert averaged[3:7] == ["--weight", "0.6", "--weight", "0.4"]
    assert evaluations[0][-4:] == ["--against", "out/labels_2", "--json", "out/distilled_2.json"]


def test_steps_are_taken_once_and_again_after_a_change_of_their_config_data_or_inputs(
    runner, tmp_path, monkeypatch
):
    shutil.copytree(FOLDER, tmp_path / "recipes")
    monkeypatch.setitem(runner["steps"].__globals__, "FOLDER", tmp_path / "recipes")
    taken = []

    def pretend(command, *, check):
        (output,) = (step.output for step in made if step.arguments == command[3:])
        taken.append(output.stem if output.suffix == ".json" else output.parent.name)
        output.parent.mkdir(exist_ok=True)
        output.touch()

    monkeypatch.setattr("subprocess.run", pretend)

    def take(data="data"):
        taken.clear()
        made[:] = runner["steps"](Path(data), tmp_path / "out", ["labels", "distilled"], [1])
        (tmp_path / "out").mkdir(exist_ok=True)
        runner["take"](made, tmp_path / "out" / "steps.json")
        return taken

    made = []
    assert len(take()) == 7 and not take()
    with (tmp_path / "recipes" / "distilled.yaml").open("a") as file:
        file.write("\nseed: 7\n")
    assert take() == ["distilled_1", "distilled_1"]
    # The other network is evaluated again, because it is compared with this one.
    with (tmp_path / "recipes" / "labels.yaml").open("a") as file:
        file.write("\nseed: 7\n")
    assert take() == ["labels_1", "labels_1", "distilled_1"]
    assert len(take("other")) == 7 and not take("other")


def test_the_table_has_mean_spread_and_interval_in_percent(runner, tmp_path):
    def write(name, accuracy, difference=None):
        bounds = [accuracy - 0.02, accuracy + 0.01]
        result = {"accuracy": accuracy, "eer": 0.1, "intervals": {"accuracy": bounds, "eer": [0.05, 0.2]}}
        one = {"difference": difference, "interval": [0.01, 0.1], "p": 0.01}
        change = {"accuracy": one, "eer": one}
        targets = (runner["LFW"], runner["SMALL_LFW"])
        differences = dict.fromkeys(targets, change) if difference else {}
        report = {"sets": dict.fromkeys(targets, result), "differences": differences}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))

    write("y1", 0.99)
    write("labels_1", 0.80)
    write("labels_2", 0.82)
    write("distilled_1", 0.88, 0.08)
    write("distilled_2", 0.88, 0.06)
    rows = runner["table"](tmp_path, ["labels", "distilled"], [1, 2]).splitlines()
    assert rows[2].split(" | ")[2] == "10.00 [5.00, 20.00]"
    assert [row.split(" | ")[1] for row in rows[2:]] == [
        "99.00 [97.00, 100.00]",
        "81.00 (80.00 to 82.00) [79.00, 82.00]",
        "88.00 (88.00 to 88.00) [86.00, 89.00]",
        "7.00 (6.00 to 8.00) [1.00, 10.00]",
    ]


@pytest.mark.parametrize("recipes", ["real_faces", "speedrun"])
def test_a_folder_without_the_faces_is_a_usage_error(recipes, tmp_path, monkeypatch, capsys):
    runner = runpy.run_path(str(ROOT / "recipes" / recipes / "run.py"))
    monkeypatch.setattr("sys.argv", ["run.py", "--data", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as stopped:
        runner["main"]()
    assert stopped.value.code == 2
    assert f"error: --data: {tmp_path / 'none' / 'faces_train'} does not exist" in capsys.readouterr().err
