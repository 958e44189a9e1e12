"""Checkpoints of another run, renamed and damaged ones, and a config that was edited between stop and resume."""

import json
import shlex
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from facetrain import api
from facetrain.checkpoint.load import Checkpoint
from facetrain.cli.app import app
from facetrain.config.loading import load_config
from facetrain.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    ModelError,
    RunError,
    UsageError,
)
from facetrain.models.embedding_model import open_model
from facetrain.models.model_file import training_data
from facetrain.models.read_model import read_model
from facetrain.telemetry.jsonl import read_jsonl
from facetrain.telemetry.log import stop_logging
from tests.support import training
from tests.support.checkpoints import flip_a_bit
from tests.support.command import refusal
from tests.support.datasets import write_records
from tests.support.training import go_on


@pytest.fixture(scope="module")
def runs(dataset, tmp_path_factory):
    """Two finished runs of one config, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("identity")
    config = training.write_tiny_config(
        folder,
        dataset,
        head={"margin": {"m2": 0.3, "scale": 16}},
        train={"max_steps": 4},
        checkpoint={"every_steps": 2},
        log={"every_steps": 1},
    )
    for name in ("a", "b"):
        assert training.train(load_config(config), folder / name) == 0
        # Without it, the run is evaluated by its newest checkpoint.
        (folder / name / "model.safetensors").unlink()
    return folder


@pytest.fixture
def run(runs, tmp_path):
    """Copy of a run that is resumed by `go_on`."""
    return shutil.copytree(runs / "a", tmp_path / "a")


def checkpoint(run, step):
    return run / "checkpoints" / f"step_{step:08d}"


def replace(run, step, source):
    shutil.rmtree(checkpoint(run, step), ignore_errors=True)
    shutil.copytree(source, checkpoint(run, step))


def edit(run, old, new):
    text = (run / "config.yaml").read_text()
    assert old in text
    (run / "config.yaml").write_text(text.replace(old, new))


def trained_on(run):
    """Return name and path of each dataset that the model of a run names."""
    description = read_model(run).description
    names = [card["name"] for card in description["datasets"]]
    return list(zip(names, training_data(description), strict=True))


def test_folder_and_checkpoints_of_a_run_have_its_id(runs):
    ids = [(runs / name / "run_id.txt").read_text().strip() for name in ("a", "b")]
    assert ids[0] != ids[1] and all(len(one) == 16 for one in ids)
    for name, run_id in zip(("a", "b"), ids, strict=True):
        assert {Checkpoint.open(runs / name, step).meta["run_id"] for step in (2, 4)} == {run_id}


def test_the_numbers_of_the_data_are_recorded_that_the_run_has_opened(runs):
    environment = json.loads((runs / "a" / "environment.json").read_text())
    assert (environment["identities"], environment["images"]) == (20, 120)


def test_a_checkpoint_of_another_run_is_refused(runs, run):
    foreign = checkpoint(runs / "b", 4)
    replace(run, 4, foreign)
    ids = [(folder / "run_id.txt").read_text().strip() for folder in (runs / "b", run)]
    for use in (lambda: go_on(run), lambda: open_model(run, torch.device("cpu"))):
        with pytest.raises(ForeignCheckpointError, match=f"run_id: .*{ids[0]}.*{ids[1]}"):
            use()
    assert open_model(checkpoint(run, 4), torch.device("cpu")), "its path names it on purpose"


def test_a_renamed_checkpoint_is_refused(run):
    checkpoint(run, 4).rename(checkpoint(run, 30))
    for use in (lambda: go_on(run), lambda: open_model(run, torch.device("cpu"))):
        with pytest.raises(ForeignCheckpointError, match=r"step: .*\b4\b.*step_00000004"):
            use()
    assert open_model(checkpoint(run, 30), torch.device("cpu"))


def test_a_run_folder_without_an_id_gets_that_of_its_checkpoint(runs, run):
    (run / "run_id.txt").unlink()
    assert go_on(run, 2) == 0
    assert (run / "run_id.txt").read_text() == (runs / "a" / "run_id.txt").read_text()
    (run / "run_id.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"run_id\.txt: "):
        go_on(run)


def test_every_config_key_that_was_edited_is_reported(run, capfd):
    edit(run, "lr: 0.1", "lr: 0.05")
    edit(run, "  clip_grad_norm: 5.0\n", "")
    edit(run, "weight_decay: 0.0005", "weight_decay: 0.1")
    assert go_on(run, 2) == 0
    printed = capfd.readouterr().err
    lines = [
        "config changed since the checkpoint of step 2: optim.lr: 0.1 → 0.05",
        "config changed since the checkpoint of step 2: optim.weight_decay: 0.0005 → 0.1",
    ]
    assert [line for line in printed.splitlines() if line.startswith("config changed")] == lines
    log = (run / "log.txt").read_text()
    assert all(line in log for line in lines)
    noted = [record for record in read_jsonl(run / "metrics.jsonl") if "config_key" in record]
    assert [(one["step"], one["config_key"], one["before"], one["now"]) for one in noted] == [
        (2, "optim.lr", 0.1, 0.05), (2, "optim.weight_decay", 0.0005, 0.1),
    ]  # fmt: skip
    assert go_on(run) == 0
    assert len([one for one in read_jsonl(run / "metrics.jsonl") if "config_key" in one]) == 2


@pytest.mark.parametrize(
    ("key", "old", "new", "change"),
    [
        ("seed", "seed: 2048", "seed: 1", "seed=1"),
        ("head.margin.m2", "m2: 0.3", "m2: 0.5", "head.margin.m2=0.5"),
        ("distill", "distill: null", "distill: {teacher: RUN}", "distill={teacher: RUN}"),
        ("distill", "distill: null", "distill: {teacher: RUN}", "distill.teacher=RUN"),
    ],
)
def test_an_edited_key_that_makes_it_another_run_is_refused_unless_it_is_set(run, key, old, new, change):
    edit(run, old, new.replace("RUN", str(run)))
    before = (run / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=rf"^{key}: .*--set '?{key}="):
        go_on(run, 2)
    assert (run / "config.yaml").read_text() == before
    assert go_on(run, 2, [change.replace("RUN", str(run))]) == 0


def test_another_recipe_is_refused_because_it_gives_defaults_only(run):
    with pytest.raises(ConfigError, match=r'^recipe: "arcface2022" → "head": '):
        go_on(run, 2, ["recipe=head"])


def test_a_resume_may_not_set_another_first_model(run):
    before = (run / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r'^model\.init_from: null → ".*/other\.pt": .*start a new run$'):
        go_on(run, 2, ["model.init_from=other.pt"])
    assert (run / "config.yaml").read_text() == before
    assert go_on(run, 2, ["model.init_from=null"]) == 0


def test_all_refused_changes_are_named_at_once_with_the_options_that_allow_them(run):
    edit(run, "seed: 2048", "seed: 1")
    edit(run, "distill: null", f"distill: {{teacher: {run}}}")
    with pytest.raises(ConfigError) as refused:
        go_on(run, 2)
    assert str(refused.value).startswith(f'seed: 2048 → 1, distill: null → {{"teacher": "{run}"')
    options = shlex.split(str(refused.value).partition("with --set ")[2])
    assert go_on(run, 2, [option for option in options if option != "--set"]) == 0


def test_another_dataset_of_as_many_identities_is_refused_unless_it_is_set(run, dataset, tmp_path, capsys):
    other = write_records(tmp_path / "other", [n // 5 for n in range(100)], size=32)
    edit(run, f"train: {dataset}/data", f"train: {other}")
    with pytest.raises(ConfigError, match="data.train: .*--set data.train=VALUE"):
        go_on(run, 2)
    capsys.readouterr()
    assert go_on(run, 2, [f"data.train={other}"]) == 0
    assert (
        "data.train: the run continues after step 2 with other images, another order"
        in capsys.readouterr().err
    )
    # The model has learned from both.
    assert trained_on(run) == [("data", f"{dataset}/data"), ("other", str(other))]
    moved = other.rename(tmp_path / "moved")
    edit(run, f"train: {other}", f"train: {moved}")
    assert go_on(run, changes=["train.max_steps=6"]) == 0, "the same dataset under another path"
    assert trained_on(run) == [("data", f"{dataset}/data"), ("moved", str(moved))]


def test_a_model_that_began_with_another_one_names_the_data_of_both(runs, dataset, tmp_path):
    other = write_records(tmp_path / "other", [n // 5 for n in range(100)], size=32)
    changes = [f"data.train={other}", f"model.init_from={runs / 'a'}"]
    assert training.train(load_config(runs / "tiny.yaml", changes), tmp_path / "tuned") == 0
    both = [("data", f"{dataset}/data"), ("other", str(other))]
    assert trained_on(tmp_path / "tuned") == both
    assert go_on(tmp_path / "tuned", 2) == 0
    assert trained_on(tmp_path / "tuned") == both
    (other / "dataset_card.yaml").write_text("name: corrected")
    assert go_on(tmp_path / "tuned", 2) == 0
    assert trained_on(tmp_path / "tuned") == [both[0], ("corrected", str(other))]


@pytest.fixture
def killed(monkeypatch):
    """Continue a run in the manner of `go_on`, and end before its first step, as by a kill."""

    def end(parts):
        stop_logging(parts.log)
        raise SystemExit(137)

    def go_on_and_end(*arguments):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr("facetrain.run.train._train", end)
            go_on(*arguments)

    return go_on_and_end


def test_what_a_command_has_set_holds_after_kills_until_the_next_checkpoint(run, tmp_path, killed):
    other = write_records(tmp_path / "other", [n // 5 for n in range(100)], size=32)
    killed(run, 2, ["head.margin.m2=0.5", f"data.train={other}"])
    killed(run, None, ["seed=1"])
    edit(run, "m2: 0.5", "m2: 0.6")
    with pytest.raises(ConfigError, match="^head.margin.m2: 0.3 → 0.6: "):
        go_on(run)
    edit(run, "m2: 0.6", "m2: 0.5")
    assert go_on(run) == 0
    assert "m2: 0.5" in Checkpoint.open(run, 4).meta["config"]
    edit(run, "m2: 0.5", "m2: 0.3")
    with pytest.raises(ConfigError, match="^head.margin.m2: 0.5 → 0.3: "):
        go_on(run)


def test_what_a_command_has_set_does_not_hold_for_another_checkpoint_or_with_a_damaged_record(run, killed):
    killed(run, 4, ["head.margin.m2=0.5", "train.max_steps=6"])
    refused = pytest.raises(ConfigError, match="^head.margin.m2: 0.3 → 0.5: ")
    with refused:
        go_on(run, 2)
    environment = json.loads((run / "environment.json").read_text())
    environment["accepted"]["changes"] = [1]
    (run / "environment.json").write_text(json.dumps(environment))
    with refused:
        go_on(run)


def link_manifest(path, target):
    path.rename(path.with_name("other.json"))
    path.symlink_to(path.with_name(target))


MANIFESTS = {
    "missing": lambda path: path.unlink(),
    "a link to a file inside": lambda path: link_manifest(path, "other.json"),
    "a link to nothing": lambda path: link_manifest(path, "nothing"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "not JSON": lambda path: path.write_text("{\n 'a': 1}"),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "cut off": lambda path: path.write_text(path.read_text()[:100]),
    "an entry of a file without a name": lambda path: path.write_text(
        json.dumps(json.loads(path.read_text()) | {"files": [{}]})
    ),
    "in no folder but a file": lambda path: (shutil.rmtree(path.parent), path.parent.write_text("")),
    "of a file with another bit": lambda path: flip_a_bit(path.with_name("replicated.safetensors")),
}


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_each_damage_of_the_newest_checkpoint_has_the_same_outcome_in_every_command(run, manifest):
    MANIFESTS[manifest](checkpoint(run, 4) / "manifest.json")
    command = f"continue from it with `facetrain resume {run} --checkpoint 2`"
    for use in (lambda: go_on(run), lambda: open_model(run, torch.device("cpu"))):
        with pytest.raises(DamagedCheckpointError) as caught:
            use()
        message = str(caught.value)
        assert command in message and f"evaluate {checkpoint(run, 2)}" in message
        assert "Expecting" not in message and "column" not in message and "codec" not in message
        assert "\n" not in message and "argument" not in message


def test_a_resume_from_an_older_checkpoint_says_that_it_goes_back(run, capfd):
    (checkpoint(run, 4) / "manifest.json").unlink()
    api.resume(run, 2)
    printed = capfd.readouterr().err
    line = "going back to step 2: what is newer is kept as left_step_00000004"
    assert f"warning: {line}" in printed and line in (run / "log.txt").read_text()
    assert Checkpoint.open(run).step == 4
    shutil.rmtree(checkpoint(run, 4))
    assert go_on(run) == 0
    assert "going back to step 2: step_00000004, the newest checkpoint, is missing" in capfd.readouterr().err


def test_without_a_sound_checkpoint_the_error_does_not_name_one(run):
    for step in (2, 4):
        (checkpoint(run, step) / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpointError, match="step_00000004") as refused:
        go_on(run)
    assert "step_00000002" not in str(refused.value)


def test_a_checkpoint_that_was_copied_elsewhere_is_of_no_run(runs, tmp_path):
    copied = shutil.copytree(checkpoint(Path(runs / "a"), 4), tmp_path / "best")
    assert open_model(copied, torch.device("cpu"))
    flip_a_bit(copied / "replicated.safetensors")
    with pytest.raises(DamagedCheckpointError, match=r"best.*replicated\.safetensors"):
        open_model(copied, torch.device("cpu"))


def test_eval_refuses_a_damaged_checkpoint_and_takes_another_by_its_path(run, dataset, capfd):
    (checkpoint(run, 4) / "manifest.json").unlink()
    options = ["--target", dataset / "data" / "val.bin", "--bootstrap", 0, "--device", "cpu"]
    assert f"facetrain resume {run} --checkpoint 2" in str(refusal("eval", run, *options))
    app(["eval", *map(str, (checkpoint(run, 2), *options))], standalone_mode=False)
    assert f"{checkpoint(run, 2)}: " in capfd.readouterr().out


def first_layer(path):
    return open_model(path, torch.device("cpu")).network.state_dict()["conv1.weight"]


@pytest.mark.parametrize(("step", "last"), [(None, 6), (2, 3), (2, 5)])
def test_a_run_that_ends_before_its_model_is_written_is_opened_with_its_newest_weights(
    run, monkeypatch, step, last
):
    def full_disk(path, *_):
        raise RunError(f"{path}: No space left on device")

    assert go_on(run, changes=["train.max_steps=5"]) == 0
    model = run / "model.safetensors"
    of_first_end = first_layer(model)
    assert torch.equal(first_layer(run), of_first_end)
    with monkeypatch.context() as disk, pytest.raises(RunError, match="No space left"):
        disk.setattr("facetrain.run.results.save_model", full_disk)
        go_on(run, step, [f"train.max_steps={last}", "optim.lr=0.01"])
    expected = first_layer(checkpoint(run, last))
    assert torch.equal(first_layer(run), expected) and not torch.equal(of_first_end, expected)
    assert torch.equal(read_model(run)[0]["conv1.weight"], expected)
    assert go_on(run) == 0 and torch.equal(first_layer(model), expected)
    if step:
        assert torch.equal(first_layer(run / "left_model.safetensors"), of_first_end)


def test_other_versions_of_packages_are_named_when_a_run_continues(run, capfd):
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"] == version("torch")
    environment["packages"] |= {"torch": "2.0.0", "numpy": "1.0"}
    (run / "environment.json").write_text(json.dumps(environment))
    assert go_on(run, changes=["train.max_steps=5"]) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "versions of packages" in line]
    assert len(lines) == 1 and f"torch 2.0.0 → {version('torch')}" in lines[0] and "numpy 1.0 → " in lines[0]
    assert lines[0] in "warning: " + (run / "log.txt").read_text().replace("WARNING ", "warning: ")
    assert go_on(run, changes=["train.max_steps=6"]) == 0
    assert "versions of packages" not in capfd.readouterr().err


def test_a_run_continues_without_the_file_that_it_was_initialized_from(runs, tmp_path, capfd):
    source = shutil.copytree(runs / "a", tmp_path / "source")
    initialized = [f"model.init_from={source}", "head.init_from=keep"]
    assert training.train(load_config(runs / "tiny.yaml", initialized), tmp_path / "tuned") == 0
    expected = (tmp_path / "tuned" / "model.safetensors").read_bytes()
    shutil.rmtree(source)
    # Neither an edit nor the command that began the run replaces the recorded model.
    edit(tmp_path / "tuned", f"init_from: {source}", "init_from: /other")
    assert go_on(tmp_path / "tuned", 2) == 0
    lines = capfd.readouterr().err
    assert f'model.init_from: "/other" has no effect: the run has begun with "{source}"\n' in lines
    assert "for a new network" not in lines
    again = load_config(runs / "tiny.yaml", ["model.init_from=/other", "head.init_from=keep"])
    assert training.train(again, tmp_path / "tuned", resume_existing=True) == 0
    assert load_config(tmp_path / "tuned" / "config.yaml").model.init_from == str(source)
    assert (tmp_path / "tuned" / "model.safetensors").read_bytes() == expected
    assert go_on(tmp_path / "tuned") == 0, "a finished run"


@pytest.mark.parametrize("key", ["model.init_from", "distill.teacher"])
def test_a_missing_model_is_named_with_its_key(runs, tmp_path, key):
    missing = tmp_path / "missing"
    config = load_config(runs / "tiny.yaml", [f"{key}={missing}"])
    with pytest.raises(ModelError, match=f"^{key}: {missing}: no such file or folder$"):
        training.train(config, tmp_path / "new")


def test_a_wrong_grace_period_is_refused_before_there_is_a_run_folder(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5m")
    with pytest.raises(UsageError, match="'5m'"):
        training.train(load_config(runs / "tiny.yaml"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("checkpoint.best_metric=lfw/accuracy", "checkpoint.best_metric: lfw/accuracy "),
        ("train.stop_early={metric: val/acuracy, patience: 2}", "train.stop_early.metric: val/acuracy "),
        ("checkpoint.best_metric=val/tar@1e-02", "val/tar@1e-02 "),
        ("checkpoint.best_metric=val/eer", "val/eer "),
    ],
)
def test_a_metric_that_cannot_choose_is_refused_before_a_file_is_written(runs, tmp_path, change, named):
    config = load_config(runs / "tiny.yaml", ["eval.targets=[val]", change])
    with pytest.raises(ConfigError, match=f"{named}.*; there are val/accuracy, .*val/tar@1e-01$"):
        training.train(config, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_best_metric_that_no_set_has_is_refused_before_a_checkpoint_is_removed(run):
    with pytest.raises(ConfigError, match=r"best_metric: lwf/accuracy .*eval\.targets"):
        go_on(run, changes=["checkpoint.best_metric=lwf/accuracy", "train.max_steps=6"])
    assert checkpoint(run, 2).is_dir() and checkpoint(run, 4).is_dir()
