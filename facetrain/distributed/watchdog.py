"""Ends a process that is stopped, or stuck when its group is broken: where there are other machines, nobody else would.

Ranks that wait in vain for one that hangs give up, and so do their agents. The agent of the one that hangs
sees a living process, and would wait for it without end.

This file is also the program of the guard: it imports nothing that takes long.
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

_EVERY_S = 1.0
_WAKE_UP_S = 2.0
"""Somebody may have stopped both, guard and guarded, and let them go on."""
_ALIVE = b"."
_LAST_WORDS_FILE = "TORCHELASTIC_ERROR_FILE"


@contextmanager
def watched(rank: int, patience_s: float, reason_to_end: Callable[[], str]) -> Iterator[None]:
    """Within, this process is killed when it has not run for so many seconds, or when it has a reason to end.

    A thread of its own asks for the reason again and again, "" being none; why it was killed is said on
    standard error, and left for the elastic agent.
    """
    last_words = os.environ.get(_LAST_WORDS_FILE, "")
    command = [sys.executable, "-S", "-E", __file__, str(os.getpid()), str(rank), str(patience_s), last_words]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, env={})
    ended, way = threading.Event(), guard.stdin
    assert way is not None, "a pipe"
    every_s = min(patience_s / 4, _EVERY_S)

    def prove_alive() -> None:
        while not ended.is_set():
            reason = reason_to_end()
            with suppress(OSError, ValueError):  # without a guard it goes on unguarded
                way.write(reason.encode() or _ALIVE)
            ended.wait(every_s)

    thread = threading.Thread(target=prove_alive, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(every_s)  # not longer: it may be waiting for who does not answer
        way.close()
        guard.wait()


def last_words(path: Path) -> str:
    """Return what a guard has left for the elastic agent of the process that it has ended; "" where none has."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _guard(pid: int, rank: int, patience_s: float, last_words: str) -> None:
    """Kill a process when it says nothing for too long, or asks for it; end when it does."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the rank; its agent tells all that belong to it
    reason = f"has given no sign of life for {patience_s:.0f} s"
    while _hears(patience_s) or _hears(_WAKE_UP_S):
        said = os.read(0, 1 << 12)
        if not said:
            return
        if asked := said.lstrip(_ALIVE).decode(errors="replace"):
            reason = asked
            break
    line = f"rank {rank} (process {pid}) {reason} and is ended"
    with suppress(OSError):
        print(f"error: {line}", file=sys.stderr, flush=True)
    if last_words:
        with suppress(OSError), open(last_words, "w", encoding="utf-8") as file:
            json.dump({"message": line, "timestamp": int(time.time())}, file)
    os.kill(pid, signal.SIGKILL)


def _hears(seconds: float) -> bool:
    return bool(select.select([0], [], [], seconds)[0])


if __name__ == "__main__":
    _guard(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
