"""A worker does not outlive the agent that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_agent() -> None:
    """Have the kernel end this process when the elastic agent that started it has ended. Linux only.

    An agent that is killed, by the kernel for lack of memory or by hand, would leave workers behind
    that train on into a folder in which the run may already go on from its checkpoint.
    """
    if sys.platform.startswith("linux") and "TORCHELASTIC_RUN_ID" in os.environ:
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
