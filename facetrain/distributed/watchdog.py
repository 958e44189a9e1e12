"""Ends a process that is stopped: where there are other machines, nobody else would.

Ranks that wait in vain for one that hangs give up, and so do their agents. The agent of the one that hangs
sees a living process, and would wait for it without end.

This file is also the program of the guard: it imports nothing that takes long.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_MOST_S = 30.0
_WAKE_UP_S = 2.0
"""Somebody may have stopped both, guard and guarded, and let them go on."""


@contextmanager
def watched(rank: int, patience_s: float) -> Iterator[None]:
    """Within, this process is killed when it has not run for so many seconds."""
    command = [sys.executable, "-S", "-E", __file__, str(os.getpid()), str(rank), str(patience_s)]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, env={})
    ended, way = threading.Event(), guard.stdin
    assert way is not None, "a pipe"

    def prove_alive() -> None:
        while not ended.is_set():
            with suppress(OSError):  # without a guard it goes on unguarded
                way.write(b".")
            ended.wait(min(patience_s / 4, _MOST_S))

    thread = threading.Thread(target=prove_alive, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        way.close()
        guard.wait()


def _guard(pid: int, rank: int, patience_s: float) -> None:
    """Kill a process when it says nothing for too long; end when it does."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the rank; its agent tells all that belong to it
    while _hears(patience_s) or _hears(_WAKE_UP_S):
        if not os.read(0, 1 << 10):
            return
    print(f"rank {rank} (process {pid}) has not run for {patience_s:.0f} s, and is ended", file=sys.stderr)
    os.kill(pid, signal.SIGKILL)


def _hears(seconds: float) -> bool:
    return bool(select.select([0], [], [], seconds)[0])


if __name__ == "__main__":
    _guard(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
