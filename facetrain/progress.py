"""Type of the progress callbacks that long-running functions accept."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[int, int], None]
"""Called as `progress(done, total)` after each unit of work, in the unit that the function documents."""


def ignore_progress(done: int, total: int) -> None:
    """Do nothing: the default of functions that take a `ProgressCallback`."""
