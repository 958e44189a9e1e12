"""Whole runs through the command line: the same numbers on any number of ranks, after any interruption."""

import json
import random
import signal

import pytest
import torch

from facetrain.checkpoint.commit import complete_steps
from facetrain.checkpoint.load import Checkpoint
from facetrain.models.embedding_model import open_model
from facetrain.telemetry.jsonl import read_jsonl
from tests.support.checkpoints import flip_a_bit
from tests.support.command import facetrain, start
from tests.support.events import read_events
from tests.support.processes import descendants, kill
from tests.support.ranks import free_ports
from tests.support.runs import checked, losses, metrics
from tests.support.waiting import wait_until


@pytest.fixture
def whole(describe, tmp_path):
    """An uninterrupted run on one process, for the config options given."""

    def run(**options):
        checked(facetrain("train", "--config", describe(**options), "--run-dir", tmp_path / "whole"))
        return tmp_path / "whole"

    return run


@pytest.mark.slow
def test_a_run_leaves_its_folder_and_says_what_to_do_next(describe, tmp_path):
    process = checked(
        facetrain(
            "train",
            "--config",
            describe(workers=1),
            "--set",
            "log.tensorboard=true",
            "--set",
            "log.report=true",
        )
    )
    folder = tmp_path / "runs" / "tiny"
    there = {path.name for path in folder.iterdir()}
    written = {"config.yaml", "environment.json", "metrics.jsonl", "log.txt"}
    assert there >= written | {"checkpoints", "model.safetensors"}
    described = [
        open_model(path, torch.device("cpu")).metadata
        for path in (folder, folder / "checkpoints" / "step_00000012")
    ]
    assert described[0] == described[1] and described[0]["step"] == 12
    # The dataset has no card: its name is known, and its license is not.
    assert described[0]["datasets"][0]["license"] == "unknown" and (folder / "dataset_cards.yaml").exists()
    assert described[0]["config"]["optim"]["lr"] == 0.05 and described[0]["preprocessing"]["mean"] == 127.5
    assert "facetrain eval" in process.stdout and "finished" in process.stdout
    assert "--set train.max_steps=MORE" in process.stdout, "more epochs would change nothing"
    assert len(losses(folder)) == 12
    assert [r["step"] for r in metrics(folder) if "val/accuracy" in r] == [0, 6, 12]
    events = read_events(folder / "tensorboard" / "tiny")  # TensorBoard names the run after this folder
    log = (folder / "log.txt").read_text()
    state = json.loads((folder / "state.json").read_text())
    assert (state["state"], state["total_steps"], len(state["starts"])) == ("finished", 12, 1)
    assert "step 12/12  loss" in log and "step 12: verification of val  accuracy" in log
    assert [event.step for event in events.Scalars("eval/val/accuracy")] == [0, 6, 12]
    page = (folder / "report.html").read_text()
    assert f"report    {folder}/report.html" in process.stdout
    assert "finished" in page and "refresh" not in page and "Hardest pairs of val at step 12" in page
    assert page.count("<img") > 1 and (folder / "augmented.png").exists()
    again = checked(facetrain("train", "--config", describe()))
    assert f"{folder} exists: the folder of this run is {folder}-2" in again.stdout
    assert sorted(path.name for path in folder.parent.iterdir()) == ["tiny", "tiny-2"]
    assert "tensorboard --logdir" in process.stdout and "tensorboard --logdir" not in again.stdout

    scored = checked(facetrain("eval", folder, "--target", "val", "--json", "-"))
    found = json.loads(scored.stdout)["sets"]["val"]
    last = [r for r in metrics(folder) if "val/accuracy" in r][-1]
    assert found["accuracy"] == last["val/accuracy"] and found["auc"] == pytest.approx(last["val/auc"])

    taken = facetrain("train", "--config", describe(), "--run-dir", folder)
    assert taken.returncode == 2 and "facetrain resume" in taken.stderr


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"sample_rate": 0.3, "accumulate": 2}])
def test_two_and_three_ranks_give_the_losses_of_one(whole, describe, tmp_path, options):
    options = options | {"steps": 6}
    alone = losses(whole(**options))
    for world_size in (2, 3):
        folder = tmp_path / f"on_{world_size}"
        ranks = ("--nproc-per-node", world_size)
        checked(facetrain("train", "--config", describe(**options), "--run-dir", folder, *ranks))
        assert losses(folder) == pytest.approx(alone, rel=2e-3)
        assert losses(folder)[:3] == pytest.approx(alone[:3], rel=1e-5)


def interrupt(folder, describe, step, options):
    """Start a run, and kill its processes at once when it has reported a step."""
    process = start("train", "--config", describe(**options), "--run-dir", folder)
    path = folder / "metrics.jsonl"

    def has_come_so_far():
        reached = path.exists() and any(record.get("step", 0) >= step for record in read_jsonl(path))
        return reached and complete_steps(folder / "checkpoints")

    wait_until(has_come_so_far, process)
    kill([process.pid, *descendants(process.pid)])
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it has ended before it was killed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"sample_rate": 0.3, "head": "placement: host", "workers": 1},
        {"sample_rate": 0.3, "head": "placement: disk, momentum_dtype: int8, weight_dtype: bfloat16"},
        pytest.param({"margin": "adaface"}, marks=pytest.mark.long),
    ],
)
def test_a_run_killed_anywhere_and_resumed_records_what_the_uninterrupted_one_does(
    whole, describe, tmp_path, options
):
    options = options | {"steps": 24}  # the run must not end while this process waits for a core
    expected = metrics(whole(**options))
    folder = tmp_path / "killed"
    interrupt(folder, describe, random.Random(str(options)).randint(6, 10), options)
    checked(facetrain("resume", folder))
    assert metrics(folder) == expected
    ours, theirs = (Checkpoint.open(path) for path in (folder, tmp_path / "whole"))
    for name in ("replicated.safetensors", "rows_00000_of_00001.safetensors"):
        sums = [{f.name: f.sha256 for f in c.manifest.files}[name] for c in (ours, theirs)]
        assert sums[0] == sums[1], name


@pytest.mark.slow
def test_a_resume_whose_config_does_not_fit_leaves_the_run_as_it_was(whole):
    folder = whole(steps=8)

    def kept():
        files = [folder / "config.yaml", folder / "environment.json", *(folder / "checkpoints").rglob("*")]
        return {str(path): path.is_file() and path.read_bytes() for path in files}

    before = kept()
    refused = facetrain("resume", folder, "--checkpoint", 4, "--set", "model.embedding_size=32")
    assert refused.returncode == 2 and "model.embedding_size: " in refused.stderr
    assert "was trained with 16, and cannot continue with 32" in refused.stderr
    assert kept() == before, "neither the config nor the checkpoints behind step 4 may change"
    overrun = facetrain("resume", folder, "--set", "train.max_steps=6")
    assert overrun.returncode == 2 and "the checkpoint is past step 6" in overrun.stderr
    oversized = facetrain("resume", folder, "--set", "train.global_batch_size=1000")
    assert oversized.returncode == 2 and "fewer than one global batch of 1,000" in oversized.stderr
    assert kept() == before


@pytest.mark.slow
def test_a_resume_that_fails_on_one_rank_leaves_the_run_as_it_was(describe, tmp_path):
    folder = tmp_path / "run"
    checked(facetrain("train", "--config", describe(), "--run-dir", folder, "--nproc-per-node", 2))
    flip_a_bit(folder / "checkpoints" / "step_00000004" / "rank_00001.safetensors")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    again = ("--nproc-per-node", 2, "--set", "log.every_steps=2")
    refused = facetrain("resume", folder, "--checkpoint", 4, *again)
    assert (
        refused.returncode == 1 and "step_00000004/rank_00001.safetensors: checksum differs" in refused.stderr
    )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_commands_of_one_shell_that_sets_the_ranks_are_no_restarts_of_each_other(describe, tmp_path):
    folder, alone = tmp_path / "run", {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for port in free_ports(2):
        second = start("train", "--config", describe(), "--run-dir", folder, **alone, MASTER_PORT=str(port))
        _, errors = second.communicate(timeout=120)
    assert second.returncode == 2 and "run: already holds a run, at step 12; continue it with" in errors


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_loss_that_is_never_finite_ends_the_run_and_says_at_which_step(describe, tmp_path, ranks):
    process = facetrain(
        "train", "--config", describe(), "--run-dir", tmp_path / "wild", "--set", "optim.lr=1e30",
        "--set", "optim.clip_grad_norm=null", "--set", "optim.warmup_epochs=0",
        "--set", "train.max_steps=60", "--set", "train.epochs=60", "--nproc-per-node", ranks,
        # A verification or a checkpoint would check the network.
        "--set", "eval.targets=[]", "--set", "eval.every_steps=60", "--set", "checkpoint.every_steps=60",
    )  # fmt: skip
    assert process.returncode == 1
    assert "error: the loss or the gradient was not finite in 10 consecutive steps" in process.stderr
    assert process.stderr.count("error:") == 1 and "Traceback" not in process.stderr
    report = json.loads((tmp_path / "wild" / "diverged.json").read_text())
    assert f"step {report['step']} (loss {report['loss']}, gradient norm nan" in process.stderr
    skipped = [record["step"] for record in metrics(tmp_path / "wild") if record.get("skipped")]
    assert report["step"] == skipped[-1] + 1, "the step after those that were reported is the last"
    assert report["step"] == 11 and process.stderr.endswith(
        ", and start again\n"
    )  # the first step spoiled it
    images = [number for rank in report["images_and_labels_by_rank"] for part in rank for number in part[0]]
    assert len(report["images_and_labels_by_rank"]) == ranks and len(set(images)) == 24


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "ranks", "model"), [("bf16", 2, "."), ("fp16", 1, "checkpoints")])
def test_training_and_eval_report_the_same_numbers_to_the_last_digit(
    describe, dataset, tmp_path, precision, ranks, model
):
    config, run_dir = describe(precision=precision, steps=6), tmp_path / "run"
    # Another batch size than that of `facetrain eval`.
    arguments = ["train", "--config", config, "--run-dir", run_dir, "--set", "eval.batch_size=40"]
    checked(facetrain(*arguments, "--nproc-per-node", ranks))
    log = (run_dir / "log.txt").read_text()
    assert f"cpu in {precision}, verified in fp32" in log
    verified = next(record for record in reversed(metrics(run_dir)) if "val/accuracy" in record)
    path = run_dir if model == "." else next((run_dir / model).glob("step_00000006"))
    options = ["--data-dir", dataset / "data", "--device", "cpu", "--bootstrap", 0, "--json", "-"]
    content = json.loads(checked(facetrain("eval", path, "--target", "val", *options)).stdout)
    assert content["precision"] == "fp32"
    found = {name: value for name, value in content["sets"]["val"].items() if f"val/{name}" in verified}
    assert len(found) > 8 and "xnorm" in found
    assert found == {name: verified[f"val/{name}"] for name in found}
