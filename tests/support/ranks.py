"""Calls of a function on several gloo processes."""

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

    `function` must be defined at the top level of a module, and return tensors, arrays, numbers, strings, or
    lists and dicts of them. An exception on a rank is raised here with the traceback of that rank.
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
