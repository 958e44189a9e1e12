"""The command line, the turns and the processes of all benchmarks."""

from __future__ import annotations

import functools
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import typer

from facetrain.distributed.process_setup import set_gpu_defaults


def run(measure: Callable[..., object]) -> None:
    """Call a function with its parameters as options of the command line, and print its result as JSON.

    GPUs have the settings of a run. A result of None is not printed: other ranks than the leader return it.
    """

    @functools.wraps(measure)
    def command(**options: Any) -> None:
        set_gpu_defaults()
        report = measure(**options)
        if report is not None:
            print(json.dumps(report, indent=1))

    typer.run(command)


def seconds_in_turn(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each call in each round.

    The calls take turns, so that a busy machine slows all of them down by the same share, in random order, because the
    first one after another memory was in use is slower.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            start = clock()
            calls[name]()
            seconds[name].append(clock() - start)
    return seconds


def in_new_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Return `function(*arguments)`, computed in a new process: a peak of memory is the peak of a whole process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def memory_bytes(name: str = "VmHWM", process: int | str = "self") -> int:
    """Return a line of /proc/PROCESS/status: `VmRSS`, the resident memory, or `VmHWM`, the largest so far.

    The peak of getrusage includes that of the parent process, from which a process was forked.
    """
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def memory_mib(name: str = "VmHWM", process: int | str = "self") -> int:
    """Return `memory_bytes` in MiB."""
    return memory_bytes(name, process) >> 20
