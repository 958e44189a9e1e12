"""Signals that end a command by an exception: not while a module is imported, and not where Python drops exceptions.

Importing this module takes no time: every command does so before all others.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

_SOON_S = 0.001


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise SystemExit with 128 + its number, during an import after its end."""
    if is_importing(frame):
        raise_soon(number)
    else:
        sys.exit(128 + number)


def is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame is part of an import. C++ modules drop an exception that comes meanwhile, or abort."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return True
        frame = frame.f_back
    return False


def raise_soon(number: int) -> None:
    """Send a signal to this process in a moment."""
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(number))
    signal.setitimer(signal.ITIMER_REAL, _SOON_S)
