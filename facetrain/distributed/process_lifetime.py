"""A process does not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER = "FACETRAIN_LAUNCHER"
"""Holds the number of the process that started this one to train, where that is no elastic agent."""
_PR_SET_PDEATHSIG = 1


def is_worker() -> bool:
    """Whether this process was started to train: by torchrun, or by `facetrain train` itself."""
    return LAUNCHER in os.environ or started_by_torchrun()


def started_by_torchrun() -> bool:
    """Whether an elastic agent started this process and expects it to join a group."""
    return "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def end_with_launcher() -> None:
    """Have the kernel end this process when the one that started it to train has ended. Linux only.

    One that is killed, by the kernel for lack of memory or by hand, would leave workers behind
    that train on into a folder in which the run may already go on from its checkpoint.
    """
    if LAUNCHER in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGKILL)
    if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
        os._exit(1)  # it has ended before the kernel could be asked


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when the one that started it has ended. Linux only."""
    if sys.platform.startswith("linux"):
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
