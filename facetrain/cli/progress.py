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
    if not sys.stderr.isatty():
        yield _ProgressLines(title)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(title))  # a path may have brackets, which are tags for rich
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _ProgressLines:
    def __init__(self, title: str) -> None:
        self._title, self._printed_at = title, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._printed_at > _LINE_INTERVAL_S:
            self._printed_at = time.monotonic()
            print(f"{self._title}: {done:,} of {total:,}", file=sys.stderr, flush=True)
