"""Relation of this process to the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # from Linux's prctl.h


def launched_by_torchrun() -> bool:
    """Return whether an elastic agent, or another launcher that sets its variables, started this rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def end_with_launcher() -> None:
    """Let the kernel kill this rank when its elastic agent has ended. Linux only.

    If the agent is killed (by the kernel for lack of memory, or by hand), its ranks would otherwise train
    on in the background, and write to a folder in which the run may already continue.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGKILL)


def end_with_parent(number: int) -> None:
    """Let the kernel send this process a signal when its parent process has ended. Linux only."""
    if sys.platform.startswith("linux"):
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
