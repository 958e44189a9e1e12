"""Signals that end a command by an exception: not in an import, where a library replaces it, or where Python drops it.

Importing this module takes no time: every command does so before all others.
"""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

EXIT_CODES_OF_SIGNALS = frozenset(128 + number for number in signal.Signals)
_SOON_S, _AGAIN_S = 0.001, 0.05
_LONGEST_S = 5.0
"""Seconds for which a signal waits for the end of an import, which can be slow work of a module of one's own."""
_waits_since: list[float] = []
"""When the first signal came that waits; empty: none does."""


def with_hangup(*numbers: int) -> tuple[int, ...]:
    """Return signals, with that of the end of the terminal unless this process was started to survive it (nohup)."""
    survives = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return numbers if survives else (*numbers, signal.SIGHUP)


def exit_on_signals(*numbers: int) -> None:
    """End this process by an exception at SIGTERM, the end of its terminal, and these signals.

    Their default action ends it at once, without a word, and leaves the temporary folder of an output.
    """
    for number in with_hangup(signal.SIGTERM, *numbers):
        signal.signal(number, exit_on_signal)


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise SystemExit with 128 + its number, where it has to wait later."""
    if has_to_wait(frame):
        raise_soon(number)
    else:
        sys.exit(128 + number)


def has_to_wait(frame: FrameType | None) -> bool:
    """Return whether a signal is to be repeated later, because such code runs, and has not for long.

    C++ modules drop an exception that comes while they are imported, or abort. Pydantic raises SchemaError in place of
    one that comes while it builds a validator, NumPy TypeError of one while it compares types with fields.
    """
    while frame is not None and not _replaces_exceptions(frame):
        frame = frame.f_back
    if frame is None:
        _waits_since.clear()
        return False
    _waits_since.append(time.monotonic())
    del _waits_since[1:]
    return time.monotonic() - _waits_since[0] < _LONGEST_S


def _replaces_exceptions(frame: FrameType) -> bool:
    in_import = frame.f_code.co_filename.startswith("<frozen importlib.")
    return in_import or frame.f_globals.get("__name__", "").startswith(("pydantic.", "numpy._core._internal"))


def raise_soon(number: int) -> None:
    """Send a signal to this process in a moment."""

    def repeat(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.raise_signal(number)

    signal.signal(signal.SIGALRM, repeat)
    # More than one alarm: Python calls handlers between its own steps, and one that comes just before a wait in C would
    # be handled after that wait alone.
    signal.setitimer(signal.ITIMER_REAL, _SOON_S, _AGAIN_S)
