"""Run a function on several real gloo processes and bring back what each returned."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(*args)` on every rank of a new group; return the results in rank order.

    `function` stands at the top level of a module and returns tensors, arrays, numbers, strings, or
    lists and dicts of them. The first rank that raises fails the caller with that rank's traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (world_size, function, args, folder), nprocs=world_size)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world_size)]


def _worker(
    rank: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], folder: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        torch.save(function(*args), Path(folder, f"{rank}.pt"))
        dist.barrier()
    finally:
        dist.destroy_process_group()
