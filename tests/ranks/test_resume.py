"""A run saved on any of one to four ranks goes on on any other number of them, with the same losses."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from facetrain.config.loading import load_config
from facetrain.run import training
from facetrain.run.run_state import read_state
from tests.runs.conftest import dataset, describe  # noqa: F401
from tests.runs.test_training import losses
from tests.support.ranks import free_ports, start_ranks

SIZES = (1, 2, 3, 4)
PAIRS = [(saved_on, goes_on_on) for saved_on in SIZES for goes_on_on in SIZES if saved_on != goes_on_on]


def in_worlds(rank, config, folder, ports):
    """Be a rank of one world after the other: no process is started anew for any of them."""
    torch.set_num_threads(1)
    described = load_config(config, ["data.workers=0", "eval.targets=[]", "optim.lr=0.01"])
    for size in SIZES:
        with_rank(rank, size, ports.pop(), training.train, described, folder / f"{size}")
    for saved_on, size in PAIRS:
        target = folder / f"{saved_on}_to_{size}"
        if rank == 0:
            shutil.copytree(folder / f"{saved_on}", target)
        with_rank(rank, size, ports.pop(), training.resume, described, target, 2)


def with_rank(rank, size, port, function, *args):
    if rank < size:
        os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
        assert function(*args) == 0


@pytest.mark.long
def test_twelve_changes_of_the_number_of_ranks_change_no_loss(describe, tmp_path):  # noqa: F811
    config = describe(steps=4, checkpoint="every_steps: 2, keep: 9", sample_rate=0.3)
    ports = free_ports(len(SIZES) + len(PAIRS))
    start_ranks(in_worlds, (config, tmp_path, ports), max(SIZES))
    alone = losses(tmp_path / "1")
    assert len(alone) == 4
    for saved_on, size in PAIRS:
        starts = read_state(tmp_path / f"{saved_on}_to_{size}").starts
        assert [start.step for start in starts] == [0, 2]
    for folder in [*map(str, SIZES), *(f"{saved_on}_to_{size}" for saved_on, size in PAIRS)]:
        assert losses(Path(tmp_path, folder)) == pytest.approx(alone, rel=1e-5), folder
