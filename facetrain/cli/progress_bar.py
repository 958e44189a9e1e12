"""Progress of commands on standard error: a bar on a terminal, otherwise a line every 10 seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from facetrain.progress import ProgressCallback

_LINE_INTERVAL_S = 10.0


@contextmanager
def progress_bar(title: str) -> Iterator[ProgressCallback]:
    """Yield a progress callback that shows its numbers on standard error, with a title."""
    with progress_bars(title) as (progress,):
        yield progress


@contextmanager
def progress_bars(*titles: str) -> Iterator[list[ProgressCallback]]:
    """Yield a progress callback for each step of a command; a step without a call is not shown."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    from facetrain.telemetry.console import can_redraw

    terminal = Console(stderr=True)
    if not can_redraw(terminal):
        yield [_ProgressLines(title) for title in titles]
        return
    with Progress(console=terminal, transient=True) as bar:

        def callback(title: str) -> ProgressCallback:
            # A path may have brackets, which are tags for rich.
            task = bar.add_task(escape(title), visible=False)
            return lambda done, total: bar.update(task, completed=done, total=total, visible=True)

        yield [callback(title) for title in titles]


class _ProgressLines:
    def __init__(self, title: str) -> None:
        self._title = title
        self._started_at: float | None = None
        self._printed_at = 0.0
        self._first = self._done = 0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._started_at is None or done < self._done:
            # Not when it was made: other steps may come first, and a second model begins again.
            self._started_at = self._printed_at = now
            self._first = self._done = done
            return
        self._done = done
        if now - self._printed_at > _LINE_INTERVAL_S:
            self._printed_at = now
            left_s = (now - self._started_at) / max(done - self._first, 1) * (total - done)
            minutes, seconds = divmod(round(left_s), 60)
            print(
                f"{self._title}: {done:,} of {total:,}, {minutes}:{seconds:02} left",
                file=sys.stderr,
                flush=True,
            )
