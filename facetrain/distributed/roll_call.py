"""Which rank does not answer: asked over the store at which the ranks once met, when their group is broken."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

_STORE_TIMEOUT = timedelta(seconds=10)
_POLL_S = 0.1


def sign_in(store: Store, rank: int) -> None:
    """Leave word on which machine and in which process a rank runs."""
    store.set(f"place/{rank}", f"{socket.gethostname()}, process {os.getpid()}")


def silent_ranks(life: str, rank: int, world_size: int, patience_s: float) -> dict[int, str]:
    """Say that this rank is there, and return which others have not said so in time, and where they run.

    Every rank that has lost the others calls this; they find out at about the same moment. Where the
    store is gone too, nobody is silent.
    """
    try:
        store = _store(life)
        store.set(f"here/{rank}", "")
        silent = [other for other in range(world_size) if other != rank]
        until = time.monotonic() + patience_s
        while silent and time.monotonic() < until:
            silent = [other for other in silent if not store.check([f"here/{other}"])]
            time.sleep(_POLL_S)
        return {other: _place(store, other) for other in silent}
    except (RuntimeError, ValueError):
        return {}


def _place(store: Store, rank: int) -> str:
    with suppress(RuntimeError):
        return str(store.get(f"place/{rank}").decode(errors="replace"))
    return "nobody knows where"


def _store(life: str) -> Store:
    # A connection of its own: the group's may be in the hands of a thread that waits.
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore(f"facetrain/{life}", TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT))
