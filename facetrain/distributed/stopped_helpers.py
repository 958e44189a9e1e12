"""Watch over the processes that this one has started: a stopped or killed one would hold the run without end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from facetrain.distributed.process_lifetime import exit_with_message, is_stopped
from facetrain.errors import RunError

_LIMIT_S = 30.0
_LOOKS = 6
"""Looks within the limit. They are counted, not the seconds: Ctrl-Z stops this process together with its helpers."""


@contextmanager
def ended_if_helpers_stop(timeout_s: float, others: Set[int]) -> Iterator[None]:
    """End this process if one that it has started is stopped for `timeout_s` seconds, 30 at most.

    Not for the `others`: a program that calls facetrain may have processes that it stops on purpose.

    The message names the process: a reading process, the watchdog, one of torch's compiler. A killed process is
    reported by the code that waits for it, and by this one if none has done so in this time: torch 2.13 would wait for
    a killed process of its compiler without end, because it keeps both ends of the pipes to it open. Linux only.
    """
    limit_s, ended = min(timeout_s, _LIMIT_S), threading.Event()

    def watch() -> None:
        looks, commands = dict[int, int](), dict[int, str]()
        while not ended.wait(limit_s / _LOOKS):
            helpers = [pid for pid in descendants(os.getpid()) if pid not in others]
            # A killed process has no command any more.
            commands = {pid: _command(pid) or commands.get(pid, "") for pid in helpers}
            faults = {pid: fault for pid in helpers if (fault := _fault(pid))}
            looks = {pid: looks.get(pid, 0) + 1 for pid in faults}
            for pid in looks:
                if looks[pid] > _LOOKS:
                    _end(pid, f"process {pid} ({commands[pid]})", f"{faults[pid]} for {limit_s:.0f} s")

    # A daemon: the main thread may never come back to end it.
    threading.Thread(target=watch, name="helpers", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _command(pid: int) -> str:
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
        return command[:200].decode(errors="replace")
    return ""


def _fault(pid: int) -> str:
    """Return what keeps a process from its work, "" if nothing does or if it is about to be waited for."""
    if is_stopped(pid):
        return "was stopped (SIGSTOP)"
    with suppress(ChildProcessError):  # a process of a helper, which waits for it
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
            return f"has been ended by signal {ended.si_status}"
    return ""


def _end(pid: int, process: str, fault: str) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)  # or it would stay when this process has ended
    exit_with_message(
        f"error: {process}, which this run has started, {fault}; start the run again with `facetrain resume`",
        RunError.exit_code,
    )


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process and its descendants have started."""
    # Linux lists a process with the thread that has started it.
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        children: list[str] = []
        with suppress(OSError):  # the thread has ended in the meantime
            children = path.read_text().split()
        for child in map(int, children):
            yield child
            yield from descendants(child)
