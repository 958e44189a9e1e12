"""Runs in worlds of several sizes, whose ranks are the same processes."""

import os
import shutil

import torch

from facetrain.checkpoint.commit import complete_steps
from facetrain.config.loading import load_config
from tests.support import training
from tests.support.waiting import wait_until


def in_worlds(rank, config, settings, folder, sizes, resumed, ports):
    """Be a rank of one world after the other: no process is started anew for any of them.

    Train on each number of ranks. Then resume for each triple: on how many ranks the run was saved, on how many it
    goes on, and from which step.
    """
    torch.set_num_threads(1)
    described = load_config(config, settings)
    for size in sizes:
        with_rank(rank, size, ports.pop(), training.train, described, folder / f"{size}")
    for saved_on, size, step in resumed:
        target = folder / f"{saved_on}_to_{size}_at_{step}"
        if rank == 0:
            copy = target.with_suffix(".copy")
            shutil.copytree(folder / f"{saved_on}", copy)
            for later in complete_steps(copy / "checkpoints"):
                if later > step:  # with RANK set, a run continues from its newest checkpoint
                    shutil.rmtree(copy / "checkpoints" / f"step_{later:08d}")
            copy.rename(target)
        wait_until(target.exists)  # a rank that was not in the world before is here first
        with_rank(rank, size, ports.pop(), training.resume, described, target, step)


def with_rank(rank, size, port, function, *args):
    if rank < size:
        os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
        assert function(*args) == 0
