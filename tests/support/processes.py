"""Child processes and their children: list them, kill them, wait for their end."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # from Linux's prctl.h


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose parent ends, so that `descendants` finds it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Return the running descendants of a process, parents first."""
    found: list[int] = []
    for child in _children(pid):
        if is_alive(child):
            found.append(child)
        found += descendants(child)
    return found


def ranks_of(agent: int) -> dict[int, int]:
    """Return rank -> process of the ranks that an agent has started."""
    ranks: dict[int, int] = {}
    for pid in descendants(agent):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue  # the process has ended in the meantime
        if name.startswith(
            "rank-"
        ):  # a forked one (tests.support.forks), which has the environment of its agent
            ranks[int(name.removeprefix("rank-"))] = pid
            continue
        # The whole word: the folder of a clone may be called facetrain, too, and is in the path of the interpreter.
        if {b"facetrain", b"facetrain.cli.rank"} & set(command.split(b"\0")) and any(
            v.startswith(b"RANK=") for v in variables
        ):
            (rank,) = (int(v.removeprefix(b"RANK=")) for v in variables if v.startswith(b"RANK="))
            ranks[rank] = pid
    return ranks


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Return the files in /dev/shm that processes have mapped."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line}


def is_alive(pid: int) -> bool:
    """Return whether a process runs. A process that has ended, but was not waited for, does not."""
    try:
        return state_of(pid) not in "ZX"
    except OSError:
        return False


def state_of(pid: int) -> str:
    """Return the state of a process as `ps` names it: "T" if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def handles(pid: int, number: int, how: str = "SigCgt") -> bool:
    """Return whether a process has a handler for a signal, or ignores it ("SigIgn")."""
    (mask,) = re.findall(rf"{how}:\t(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to processes."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def wait_until_gone(pids: Iterable[int], timeout_s: float = 60) -> list[int]:
    """Wait for processes to end; return those that still run after `timeout_s`."""
    deadline, left = time.monotonic() + timeout_s, list(pids)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [pid for pid in left if is_alive(pid)]
    return left


def presses_until_the_end(process: subprocess.Popen) -> int:
    """Press Ctrl-C once a second until a process ends; return how often. Two that come at once may count as one."""
    for presses in range(1, 61):
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            continue
        return presses
    raise AssertionError("it ignores Ctrl-C")


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:
            continue  # the thread has ended in the meantime
    return found
