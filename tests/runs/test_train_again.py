"""`train --resume`: one command starts a run, and continues it as often as it is given again."""

import json
import re
import shutil
import sys

import pytest
import torch
import yaml

import facetrain
from facetrain.checkpoint.commit import complete_steps
from facetrain.config.loading import load_config
from facetrain.distributed.ranks import Ranks
from facetrain.errors import ConfigError, NoCheckpointError, UsageError
from facetrain.models.model_file import read_step
from facetrain.remote.download import pinned
from facetrain.run.agree import agree
from facetrain.run.folder.environment import recorded_environment
from facetrain.run.folder.lease import Lease
from facetrain.run.folder.lock import RunLock
from facetrain.run.folder.run_state import Start, read_state, train_recorded
from facetrain.run.request import TrainRequest
from facetrain.run.train import train as train_request
from tests.support.command import facetrain as facetrain_in_a_process
from tests.support.command import refusal
from tests.support.runs import checked, losses, metrics


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    """A run of four steps with checkpoints at steps 2 and 4, its config and its folder."""
    values = {
        "run": {"name": "first", "dir": str(tmp_path_factory.mktemp("finished"))},
        "data": {"train": str(dataset / "data"), "image_size": 32, "workers": 0},
        "model": {"backbone": "iresnet", "layers": [1, 1, 1, 1], "widths": [4, 4, 4, 4], "embedding_size": 8},
        "train": {"global_batch_size": 24, "max_steps": 4, "precision": "fp32", "device": "cpu"},
        "checkpoint": {"every_steps": 2},
        "eval": {"targets": []},
        "log": {"report": False, "every_steps": 1},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program.py", "--password", "abc"])
        return values, facetrain.train(values, resume=True).folder


@pytest.fixture
def stopped(finished, tmp_path):
    """The same run as a kill after its second step has left it."""
    values, folder = finished
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_00000002\n")
    return values, tmp_path / "run"


def test_it_continues_from_the_newest_checkpoint_and_ends_as_without_a_stop(finished, stopped):
    values, folder = stopped
    generator = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)  # as a notebook may have done for its own work
    try:
        with torch.inference_mode():
            facetrain.train(values, folder, resume=True)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), generator), "the program draws as if there was no run"
    assert metrics(folder) == metrics(finished[1])
    weights = [path / "model.safetensors" for path in (folder, finished[1])]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_run_in_a_program_records_no_arguments_of_the_program(finished):
    assert recorded_environment(finished[1])["command"] == []


def test_it_writes_nothing_to_a_run_that_is_finished_and_says_so(finished, capsys):
    values, folder = finished
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.rglob("*")}
    capsys.readouterr()
    facetrain.train(values, resume=True)
    shown = capsys.readouterr().out
    assert f"{folder}: was already finished, at step 4; to train on: facetrain resume" in shown
    assert "finished in" not in shown and "next:" not in shown
    assert "has no effect" not in shown
    facetrain.resume(folder, seed=1)
    assert "seed: 2048 → 1: has no effect, because the run was already finished\n" in capsys.readouterr().out
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.rglob("*")} == before


def test_the_new_places_of_a_finished_run_and_of_a_part_of_a_command_are_no_settings_without_effect(
    finished, tmp_path, capsys
):
    values, folder = finished
    shutil.copytree(folder, tmp_path / "moved")
    facetrain.train(values | {"run": {"name": "moved", "dir": str(tmp_path)}}, resume=True)
    data = values["data"] | {"train": str(shutil.copytree(values["data"]["train"], tmp_path / "data"))}
    part = {"run_dir": str(folder), "resume_existing": True, "is_part": True}
    train_request(TrainRequest(config=values | {"data": data}, **part))
    shown = capsys.readouterr().out
    assert shown.count(": was already finished") == 2 and "has no effect" not in shown


def test_without_it_a_folder_with_a_run_is_refused_or_gets_a_number(stopped, tmp_path, capsys):
    values, folder = stopped
    with pytest.raises(
        UsageError, match=r"run: already holds a run, at step 2; continue it with `facetrain resume"
    ):
        facetrain.train(values, folder)
    values = values | {"run": {"name": "run", "dir": str(tmp_path)}}
    again = facetrain.train(values, optim={"warmup_epochs": 20})
    assert again.folder == tmp_path / "run-2"
    assert (
        "warning: optim.warmup_epochs: 20 of 0.8 epochs: the run ends in the warm-up"
        in capsys.readouterr().err
    )


def test_it_starts_in_a_default_folder_in_which_a_run_has_ended_before_its_first_checkpoint(
    finished, tmp_path
):
    values, folder = finished
    values = values | {"run": {"name": "again", "dir": str(tmp_path)}}
    (tmp_path / "again" / "checkpoints").mkdir(parents=True)
    for name in ("run_id.txt", "config.yaml"):
        shutil.copy(folder / name, tmp_path / "again")
    failed = Start(step=0, ranks=1, device="cpu")
    with pytest.raises(ZeroDivisionError):
        train_recorded(tmp_path / "again", failed, 4, lambda: 1 // 0)
    lists = {"diverged.json", "skipped_images.txt", "skipped_files.csv"}
    for name in lists:
        (tmp_path / "again" / name).write_text("{}\n")
    assert facetrain.train(values, resume=True).folder == tmp_path / "again"
    assert metrics(tmp_path / "again") == metrics(folder)
    assert len(read_state(tmp_path / "again").starts) == 1, "it continues no run"
    assert not lists & {path.name for path in (tmp_path / "again").iterdir()}


def test_it_does_not_start_over_a_run_whose_checkpoints_are_missing(stopped):
    values, folder = stopped
    shutil.rmtree(folder / "checkpoints" / "step_00000002")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(
        NoCheckpointError, match="run: contains no checkpoint; the one that latest names is missing"
    ):
        facetrain.train(values, folder, resume=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("resume", [False, True])
def test_it_does_not_start_over_where_a_finished_run_has_lost_its_checkpoints_or_a_config_lies(
    finished, tmp_path, resume
):
    values, folder = finished
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("# my notes")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=r"run: has the results of a finished run.*--run-dir"):
        facetrain.train(values, tmp_path / "run", resume=resume)
    with pytest.raises(UsageError, match=r"mine/config\.yaml: not written by a run"):
        facetrain.train(values, tmp_path / "mine", resume=resume)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_resume_that_a_sink_refuses_changes_nothing(finished, tmp_path, monkeypatch):
    shutil.copytree(finished[1], tmp_path / "run")
    monkeypatch.setitem(sys.modules, "wandb", None)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=r"facetrain\[wandb\]"):
        facetrain.resume(tmp_path / "run", 2, log={"sinks": ["wandb"]})
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_it_finds_the_first_checkpoint_of_a_command_that_ends_while_it_waits_for_the_lock(
    finished, stopped, monkeypatch
):
    values, folder = stopped
    (folder / "checkpoints").rename(folder / "saved_later")

    acquire = RunLock.acquire

    def acquire_later(lock):
        (folder / "saved_later").rename(folder / "checkpoints")
        acquire(lock)

    monkeypatch.setattr(RunLock, "acquire", acquire_later)
    facetrain.train(values, folder, resume=True)
    assert metrics(folder) == metrics(finished[1])


@pytest.mark.parametrize(("launcher", "step"), [("another", 2), ("agent", 4)])
def test_a_job_that_is_started_again_takes_its_newest_checkpoint_and_not_the_one_of_its_command(
    finished, tmp_path, launcher, step
):
    shutil.copytree(finished[1], tmp_path / "run")
    (tmp_path / "run" / "environment.json").write_text(json.dumps({"launchers": [launcher]}))
    request = TrainRequest(command="resume", run_dir=str(tmp_path / "run"), checkpoint=2)
    with Lease() as lease:
        assert agree(Ranks(0, 0, 1, 1, "agent"), request, lease, pinned).plan.step == step


def test_a_run_that_was_killed_before_its_results_writes_them(finished, tmp_path):
    folder = shutil.copytree(finished[1], tmp_path / "run")
    (folder / "model.safetensors").unlink()
    facetrain.resume(folder)
    weights = [each / "model.safetensors" for each in (folder, finished[1])]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_finished_run_goes_back_to_an_earlier_end(finished, tmp_path):
    folder = shutil.copytree(finished[1], tmp_path / "run")
    facetrain.resume(folder, 2, train={"max_steps": 2})
    assert read_step(folder / "model.safetensors") == 2
    assert read_step(folder / "left_model.safetensors") == 4
    assert complete_steps(folder / "checkpoints") == [2]
    assert load_config(folder / "config.yaml").train.max_steps == 2


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("resume RUN --set data.train=gone", "/gone: no such folder or file"),
        ("train --config CONFIG --data gone --run-dir RUN --resume", "/gone: no such folder or file"),
        ("resume RUN --set distill.teacher=gone", "^distill.teacher: .*gone: no such file or folder"),
    ],
)
def test_what_is_gone_ends_a_run_with_checkpoints_as_a_failure_because_it_may_come_back(
    stopped, command, named
):
    folder = str(stopped[1])
    command = command.replace("RUN", folder).replace("CONFIG", f"{folder}/config.yaml")
    error = refusal(*command.split())
    assert re.search(named, str(error)) and error.exit_code == 1


def test_a_run_that_ends_earlier_now_is_refused_with_a_command_that_has_the_option(stopped):
    values, folder = stopped
    shorter = values | {"train": values["train"] | {"max_steps": 1}}
    with pytest.raises(
        ConfigError, match=r"is past step 1, .*with `facetrain resume RUN_DIR --checkpoint STEP`$"
    ):
        facetrain.train(shorter, folder, resume=True)


@pytest.mark.slow
def test_two_ranks_continue_a_run_too(stopped, finished, tmp_path):
    values, folder = stopped
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    again = ["train", "--config", tmp_path / "config.yaml", "--resume", "--run-dir", folder]
    checked(facetrain_in_a_process(*again, "--nproc-per-node", 2))
    assert losses(folder) == pytest.approx(losses(finished[1]), rel=1e-4)
