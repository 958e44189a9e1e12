"""Watchdog: a second process that kills a rank which is stopped, or blocked in a broken process group.

Needed with several nodes. The ranks that wait for one that hangs run into their timeout and end, and so do
their agents, but the agent of the rank that hangs sees a running process and waits without end.
torch's own FileTimerServer (2.13) runs only if TORCHELASTIC_ENABLE_FILE_TIMER is set for the agent, which a
plain `torchrun` lacks, and it cannot report why it killed a rank.

This file is also the program of the watchdog process. It imports neither torch nor facetrain: it must
start in milliseconds and need little memory.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MAX_INTERVAL_S = 1.0
_WAKE_UP_S = 2.0
"""Second chance: both processes may have been stopped together (a suspended machine) and just run again."""
_ALIVE = b"."
_REASON_FILE = "TORCHELASTIC_ERROR_FILE"


@contextmanager
def watchdog(rank: int, patience_s: float, reason_to_end: Callable[[], str]) -> Iterator[None]:
    """Guard this process within the block.

    The watchdog kills it if it has not run for `patience_s` seconds, or if `reason_to_end` returns a reason
    and not "". A thread calls that function every second. The watchdog prints the reason to standard error,
    and leaves it in a file for the elastic agent.
    """
    reason_file = os.environ.get(_REASON_FILE, "")
    # -S and -E: the program needs no site packages, and no variable of the rank may change it.
    command = [
        sys.executable,
        "-S",
        "-E",
        __file__,
        str(os.getpid()),
        str(rank),
        str(patience_s),
        reason_file,
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, env={})
    ended, pipe = threading.Event(), process.stdin
    assert pipe is not None, "stdin=PIPE"
    interval_s = min(patience_s / 4, _MAX_INTERVAL_S)

    def report() -> None:
        while not ended.is_set():
            reason = reason_to_end()
            with suppress(
                OSError, ValueError
            ):  # if the watchdog has been killed, training goes on without it
                pipe.write(reason.encode() or _ALIVE)
            ended.wait(interval_s)

    thread = threading.Thread(target=report, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(interval_s)  # not longer: reason_to_end may be waiting for a store that does not answer
        pipe.close()
        process.wait()


def read_reason(path: Path) -> str:
    """Return the reason that a watchdog has left in an error file of the elastic agent, or ""."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _watch(pid: int, rank: int, patience_s: float, reason_file: str) -> None:
    """Kill a process if it sends nothing for too long, or if it sends a reason. Return when it closes the pipe."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the rank: the agent signals the whole process group
    reason = f"has not run for {patience_s:.0f} s"
    while _has_input(patience_s) or _has_input(_WAKE_UP_S):
        received = os.read(0, 1 << 12)
        if not received:
            return
        if sent := received.lstrip(_ALIVE).decode(errors="replace"):
            reason = sent
            break
    message = f"rank {rank} (process {pid}) {reason} and is ended"
    with suppress(OSError):
        print(f"error: {message}", file=sys.stderr, flush=True)
    if reason_file:
        with suppress(OSError), open(reason_file, "w", encoding="utf-8") as file:
            json.dump({"message": message, "timestamp": int(time.time())}, file)
    os.kill(pid, signal.SIGKILL)


def _has_input(seconds: float) -> bool:
    return bool(select.select([0], [], [], seconds)[0])


if __name__ == "__main__":
    _watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
