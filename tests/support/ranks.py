"""Calls of a function on several gloo processes."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOADED = ["tests.support.preloaded"]


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, fresh: bool = False) -> list[Any]:
    """Call `function(*args)` on every rank of a new group; return the results in rank order.

    `function` must be defined at the top level of a module, and return tensors, arrays, numbers, strings, or
    lists and dicts of them. An exception on a rank is raised here with the traceback of that rank.

    The ranks are forked from a process that has imported torch and done nothing else. With `fresh`, that
    is a new one, which imports all modules under the environment of this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        start_ranks(_worker, (world_size, function, args, folder), world_size, fresh=fresh)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world_size)]


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that are free now, of those that the kernel gives to nobody who asks for any."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(10_000, first if first > 15_000 else 32_768)
        with suppress(OSError), socket.create_server(("localhost", port)):
            ports.append(port)
    return ports


def start_ranks(
    function: Callable[..., Any], args: tuple[Any, ...], world_size: int, *, fresh: bool = False
) -> None:
    """Call `function(rank, *args)` in `world_size` new processes and wait for them; see `run_ranks`."""
    start_worlds(function, [(world_size, args)], fresh=fresh)


def start_worlds(
    function: Callable[..., Any], worlds: list[tuple[int, tuple[Any, ...]]], *, fresh: bool = False
) -> None:
    """Call `start_ranks` for each world size with its arguments, one after another.

    With `fresh`, all ranks are forked from the same new process.
    """
    if fresh:
        mp.spawn(_fork, (function, worlds))
        return
    multiprocessing.set_forkserver_preload(PRELOADED)
    environment = dict(os.environ)  # may differ from that in which the server was started
    for size, args in worlds:
        mp.start_processes(_call, (function, environment, args), nprocs=size, start_method="forkserver")


def _fork(_: int, function: Callable[..., Any], worlds: list[tuple[int, tuple[Any, ...]]]) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    for size, args in worlds:
        mp.start_processes(function, args, nprocs=size, start_method="fork")


def _call(
    rank: int, function: Callable[..., Any], environment: dict[str, str], args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    function(rank, *args)


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
