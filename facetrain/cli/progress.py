"""A progress bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY_S = 10.0


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that shows on standard error how far work has come."""
    if not sys.stderr.isatty():
        yield _Lines(what)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    def __init__(self, what: str) -> None:
        self._what, self._said_at = what, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._said_at > _EVERY_S:
            self._said_at = time.monotonic()
            print(f"{self._what}: {done:,} of {total:,}", file=sys.stderr, flush=True)
