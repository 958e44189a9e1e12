"""A rank that is killed while another waits for it in an NCCL collective."""

import time

import pytest
import torch

from tests.runs.conftest import started_run  # noqa: F401
from tests.support.processes import kill, ranks_of, wait_until_gone
from tests.support.runs import LONG

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize(
    "head",
    [{"sample_rate": 0.5}, {"sample_rate": 0.5, "head": "placement: host"}, {"head": "placement: host"}],
)
def test_the_others_end_within_30_s_and_the_killed_rank_is_named(started_run, head):  # noqa: F811
    _, process = started_run(*LONG, "--set", "train.device=cuda", **head)
    ranks, since = ranks_of(process.pid), time.monotonic()
    kill([ranks[1]])
    assert not wait_until_gone([ranks[0]])
    _, stderr = process.communicate(timeout=20)
    assert time.monotonic() - since < 30
    assert f"error: rank 1 (process {ranks[1]}) was ended by SIGKILL" in stderr
