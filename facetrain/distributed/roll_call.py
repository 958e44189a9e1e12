"""Which rank does not answer: asked over the store at which the ranks once met, when their group is broken."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

CALLED = "roll_call"
"""The key that is there when the ranks have lost each other."""
_STORE_TIMEOUT = timedelta(seconds=10)
_POLL_S = 0.1


def sign_in(store: Store, rank: int) -> str:
    """Leave word on which machine and in which process a rank runs.

    Return where rank 0 runs if its process keeps the store, or "" where an elastic agent does.
    """
    store.set(f"place/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
    return "" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else _place(store, 0)


def silent_ranks(life: str, rank: int, world_size: int, patience_s: float, keeper: str) -> dict[int, str]:
    """Say that this rank is there, and return which others have not said so in time, and where they run.

    Every rank that has lost the others calls this; they find out at about the same moment. Where the
    store does not answer, rank 0 is silent if that keeps it; `keeper` is what `sign_in` has returned.
    """
    answers: SimpleQueue[dict[int, str]] = SimpleQueue()

    def ask() -> None:
        with suppress(RuntimeError, ValueError):
            answers.put(_ask(life, rank, world_size, patience_s))

    # A thread: who connects to a process that is stopped waits for its first word without end.
    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=patience_s + _STORE_TIMEOUT.total_seconds())
    except Empty:
        return {0: keeper} if keeper and rank else {}


def _ask(life: str, rank: int, world_size: int, patience_s: float) -> dict[int, str]:
    store = connect(life)
    store.set(CALLED, "")
    store.set(f"here/{rank}", "")
    silent = [other for other in range(world_size) if other != rank]
    until = time.monotonic() + patience_s
    while silent and time.monotonic() < until:
        silent = [other for other in silent if not store.check([f"here/{other}"])]
        time.sleep(_POLL_S)
    return {other: _place(store, other) for other in silent}


def _place(store: Store, rank: int) -> str:
    with suppress(RuntimeError):
        return str(store.get(f"place/{rank}").decode(errors="replace"))
    return "nobody knows where"


def connect(life: str) -> Store:
    """Return a connection of its own to a life's store: the group's may be in the hands of a thread that waits.

    Raises:
        RuntimeError: it does not answer, for ten seconds; one whose process is stopped is waited for without end.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore(f"facetrain/{life}", TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT))
