"""Waits for what a test cannot be told of, with a limit: a test that fails must not wait for ever. And waits that a
test decides itself.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeVar

import pytest

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], *processes: subprocess.Popen, timeout_s: float = 120, every_s: float = 0.01
) -> T:
    """Ask for a condition until it holds; return what it gave. Fail if a process ends before, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        # Before the condition, which may have come to hold with the end of a process.
        ended = next((process for process in processes if process.poll() is not None), None)
        if holds := condition():
            return holds
        assert ended is None, f"ended with {ended.returncode}: {ended.communicate()[1]}"
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(every_s)


def set_time(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Callable) -> None:
    """Replace functions of `time` in one module alone: the threads of other tests sleep with the same `time`."""
    monkeypatch.setattr(f"{module}.time", SimpleNamespace(**vars(time) | functions))
