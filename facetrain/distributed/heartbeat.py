"""Heartbeat thread that detects a broken process group during training, and the search for silent ranks.

A collective reports that other ranks are gone, but only to a rank that calls one. A rank that is blocked
in a lock, or in a read from a dead disk, never does. So a thread of each rank writes a heartbeat to the
store every second, reads the heartbeat of the next rank, and looks for the report that the group is
broken. It does not judge how long the rank itself takes: while the group is intact, neither a slow
evaluation nor a slow compilation nor a slow save ends it.

torch 2.13 has no replacement. NCCL's heartbeat monitor (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC) watches NCCL's own
thread in the same process, and gloo has none. `torch.distributed.monitored_barrier` names ranks only on rank
0, and fails on a group in which a collective has timed out.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from torch.distributed import Store  # type: ignore[attr-defined]

from facetrain.distributed.rendezvous import connect_to_store, place_of

_PACKAGE = str(Path(__file__).resolve().parents[1])
_BROKEN = "group_is_broken"
"""Key of the store that a rank sets when it has lost the others."""
_MAX_INTERVAL_S = 15.0
"""Longest time counted between two looks: after a suspend of many hours the group may still be intact."""
_POLL_S = 0.1
_STORE_ANSWERS_WITHIN_S = 10.0


class Heartbeat:
    """Heartbeat of one rank. All methods must be called from one thread."""

    def __init__(
        self, rendezvous_id: str, rank: int, world_size: int, *, patience_s: float, grace_s: float
    ) -> None:
        """Set the limits.

        `patience_s` is the number of seconds without a heartbeat of the next rank, `grace_s` the number of
        seconds after the report of a broken group, after which this rank has to end.
        """
        self._rendezvous_id = rendezvous_id
        self._own_key, self._next_key = f"heartbeat/{rank}", f"heartbeat/{(rank + 1) % world_size}"
        self._patience_s, self._grace_s = patience_s, grace_s
        self._store: Store | None = None
        self._count, self._last_heard, self._is_broken = 0, b"", False
        self._checked_at = time.monotonic()
        self._silent_s = self._broken_s = 0.0

    def reason_to_end(self) -> str:
        """Send a heartbeat and check the others; return why this process has to end, or "".

        Blocks without end if the process that hosts the store is stopped.
        """
        heard = self._is_broken or self._exchange()
        now = time.monotonic()
        passed_s, self._checked_at = min(now - self._checked_at, _MAX_INTERVAL_S), now
        self._silent_s = 0.0 if heard else self._silent_s + passed_s
        self._broken_s += passed_s if self._is_broken else 0.0
        if self._broken_s > self._grace_s:
            return f"still ran {self._grace_s:.0f} s after its process group broke, {_position()},"
        if self._silent_s > self._patience_s:
            return f"received no heartbeat of another rank for {self._patience_s:.0f} s, {_position()},"
        return ""

    def _exchange(self) -> bool:
        """Send a heartbeat; return whether the next rank has sent one since the last call."""
        try:
            store = self._store = self._store or connect_to_store(self._rendezvous_id)
            self._count += 1
            store.set(self._own_key, str(self._count))
            before = self._last_heard
            self._last_heard = store.get(self._next_key) if store.check([self._next_key]) else b""
            self._is_broken = store.check([_BROKEN])
        except (RuntimeError, ValueError):
            self._store = None  # connect again at the next call: the network may have recovered
            return False
        return self._last_heard != before


def silent_ranks(
    rendezvous_id: str, rank: int, world_size: int, patience_s: float, store_host: str
) -> dict[int, str]:
    """Report that the group is broken, and return the ranks that do not report so in time, with their places.

    Every rank that has lost the others calls this, and all of them notice at about the same moment. If the
    store does not answer, rank 0 is the silent one, provided that its process hosts the store: `store_host`
    is what `register_rank` has returned.
    """
    answers: SimpleQueue[dict[int, str]] = SimpleQueue()

    def ask() -> None:
        with suppress(RuntimeError, ValueError):
            answers.put(_wait_for_reports(rendezvous_id, rank, world_size, patience_s))

    # In a thread: a connection to a process that is stopped waits without end for its first answer.
    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=patience_s + _STORE_ANSWERS_WITHIN_S)
    except Empty:
        return {0: store_host} if store_host and rank else {}


def _wait_for_reports(rendezvous_id: str, rank: int, world_size: int, patience_s: float) -> dict[int, str]:
    store = connect_to_store(rendezvous_id)
    store.set(_BROKEN, "")
    store.set(f"alive/{rank}", "")
    silent = [other for other in range(world_size) if other != rank]
    deadline = time.monotonic() + patience_s
    while silent and time.monotonic() < deadline:
        silent = [other for other in silent if not store.check([f"alive/{other}"])]
        time.sleep(_POLL_S)
    return {other: place_of(store, other) for other in silent}


def _position() -> str:
    """Return the line at which the main thread is: the innermost of this package, else the innermost."""
    frame = innermost = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = innermost
    return f"at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
