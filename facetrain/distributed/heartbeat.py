"""Whether a rank's group still stands, found out beside training: where it does not, the rank has to end.

A collective tells a rank that the others are gone, but only one that calls it. Who is stuck in a lock or a read
from a dead disk never does. So a thread of each rank leaves a beat at the store at which all met, looks for the
beat of the next rank, and for word that the ranks have lost each other. It judges nothing that the rank itself
does: the slowest evaluation, compilation or save is no reason to end it while the group stands.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from facetrain.distributed.roll_call import CALLED, connect

_PACKAGE = str(Path(__file__).resolve().parents[1])
_MOST_S = 15.0
"""Counted for one look: a machine that slept for hours wakes up with its group as it was."""


class Pulse:
    """What one rank leaves and finds at the store. All methods belong to one thread."""

    def __init__(self, life: str, rank: int, world_size: int, *, patience_s: float, grace_s: float) -> None:
        self._life = life
        self._own, self._next = f"beat/{rank}", f"beat/{(rank + 1) % world_size}"
        self._patience_s, self._grace_s = patience_s, grace_s
        self._store: Store | None = None
        self._beats, self._heard, self._is_over = 0, b"", False
        self._looked_at = time.monotonic()
        self._quiet_s = self._over_s = 0.0

    def reason_to_end(self) -> str:
        """Leave a beat and look at the others; return why this process has to end, "" while it has not to.

        It may wait without end: for a store whose process is stopped.
        """
        heard = self._is_over or self._exchange()
        now = time.monotonic()
        passed_s, self._looked_at = min(now - self._looked_at, _MOST_S), now
        self._quiet_s = 0.0 if heard else self._quiet_s + passed_s
        self._over_s += passed_s if self._is_over else 0.0
        if self._over_s > self._grace_s:
            return f"was still there {self._grace_s:.0f} s after its group had broken, {_whereabouts()},"
        if self._quiet_s > self._patience_s:
            return f"has heard of no other rank for {self._patience_s:.0f} s, {_whereabouts()},"
        return ""

    def _exchange(self) -> bool:
        """Leave a beat; return whether the next rank has left one since the last time."""
        try:
            store = self._store = self._store or connect(self._life)
            self._beats += 1
            store.set(self._own, str(self._beats))
            before, self._heard = self._heard, store.get(self._next) if store.check([self._next]) else b""
            self._is_over = store.check([CALLED])
        except (RuntimeError, ValueError):
            self._store = None  # the way to it may be there again at the next try
            return False
        return self._heard != before


def _whereabouts() -> str:
    """Return where the main thread is: its innermost line of this package, else its innermost one."""
    frame = innermost = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = innermost
    return f"at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
