"""Whole runs on two GPUs: their losses, and how they end."""

import time

import pytest
import torch

from tests.runs.conftest import started_run  # noqa: F401
from tests.support.command import facetrain, torchrun
from tests.support.gpu_runs import DEVICE, HEADS, trained
from tests.support.processes import kill, ranks_of, wait_until_gone
from tests.support.runs import LONG, checked, losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.filterwarnings("default"),  # the compiler's own are not ours
]


@pytest.mark.parametrize("name", HEADS)
def test_two_gpus_lose_what_one_does(name, describe, tmp_path):
    config = describe(steps=6, **HEADS[name])
    alone = trained(config, tmp_path / "one", f"train.device={DEVICE}")
    command = "train", "--config", config, "--set", f"train.device={DEVICE}", "--set", "eval.targets=[]"
    checked(torchrun(2, *command, "--run-dir", tmp_path / "two"))
    assert losses(tmp_path / "two") == pytest.approx(alone, rel=2e-2)


def test_a_record_that_cannot_be_read_ends_all_ranks_at_once_and_is_reported(describe, dataset, tmp_path):
    config, records = describe(), tmp_path / "data"
    records.mkdir()
    for path in (dataset / "data").iterdir():
        (records / path.name).write_bytes(path.read_bytes())
    whole = (records / "train.rec").read_bytes()
    (records / "train.rec").write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    command = "--set", f"data.train={records}", "--set", f"train.device={DEVICE}", "--set", "eval.targets=[]"
    done = facetrain(
        "train", "--config", config, *command, "--nproc-per-node", 2, "--run-dir", tmp_path / "run"
    )
    assert done.returncode == 2 and "train.rec" in done.stderr


def test_two_gpus_with_replayed_code_have_the_losses_of_two_without(describe, tmp_path):
    config, found = describe(steps=6), {}
    for mode in ("off", "reduce-overhead"):
        command = ["train", "--config", config, "--run-dir", tmp_path / mode]
        for change in ("eval.targets=[]", "train.device=cuda", f"train.compile={mode}"):
            command += ["--set", change]
        checked(torchrun(2, *command))
        found[mode] = losses(tmp_path / mode)
    assert found["reduce-overhead"] == pytest.approx(found["off"], rel=5e-2)


@pytest.mark.parametrize(
    "head",
    [{"sample_rate": 0.5}, {"sample_rate": 0.5, "head": "placement: host"}, {"head": "placement: host"}],
)
def test_a_killed_rank_is_named_and_the_others_end_within_30_s(started_run, head):  # noqa: F811
    _, process = started_run(*LONG, "--set", "train.device=cuda", **head)
    ranks, since = ranks_of(process.pid), time.monotonic()
    kill([ranks[1]])
    assert not wait_until_gone([ranks[0]])
    _, stderr = process.communicate(timeout=20)
    assert time.monotonic() - since < 30
    assert f"error: rank 1 (process {ranks[1]}) was ended by SIGKILL" in stderr
