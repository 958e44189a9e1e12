"""Watch over the processes that this one has started: a stopped one would hold the run without end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from facetrain.distributed.process_lifetime import exit_with_message, is_stopped
from facetrain.errors import RunError

_LIMIT_S = 30.0
_LOOKS = 6
"""Looks within the limit. They are counted, not the seconds: Ctrl-Z stops this process together with its helpers."""


@contextmanager
def ended_if_helpers_stop(timeout_s: float) -> Iterator[None]:
    """End this process if one that is started within the block is stopped for `timeout_s` seconds, 30 at most.

    The message names the process: a reading process, the watchdog, one of torch's compiler. A process that has ended is
    reported by the code that waits for it. Linux only.
    """
    limit_s, ended = min(timeout_s, _LIMIT_S), threading.Event()
    # A program that calls facetrain may have processes that it stops on purpose.
    others = set(_descendants(os.getpid()))

    def watch() -> None:
        looks: dict[int, int] = {}
        while not ended.wait(limit_s / _LOOKS):
            stopped = [pid for pid in _descendants(os.getpid()) if pid not in others and is_stopped(pid)]
            looks = {pid: looks.get(pid, 0) + 1 for pid in stopped}
            for pid in looks:
                if looks[pid] > _LOOKS:
                    _end(pid, limit_s)

    # A daemon: the main thread may never come back to end it.
    threading.Thread(target=watch, name="helpers", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _end(pid: int, limit_s: float) -> None:
    command = b""
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()[:200]
        os.kill(pid, signal.SIGKILL)  # or it would stay when this process has ended
    exit_with_message(
        f"error: process {pid} ({command.decode(errors='replace')}), which this run has started, was stopped (SIGSTOP) "
        f"for {limit_s:.0f} s; start the run again with `facetrain resume`",
        RunError.exit_code,
    )


def _descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process and its descendants have started."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        children: list[str] = []
        with suppress(OSError):  # the thread has ended in the meantime
            children = path.read_text().split()
        for child in map(int, children):
            yield child
            yield from _descendants(child)
