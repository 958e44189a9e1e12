"""Parallel map that keeps the order, and progress reports of an iteration."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from facetrain.cpu_cores import usable_cores
from facetrain.progress import ProgressCallback

S = TypeVar("S")
T = TypeVar("T")


def map_in_order(
    function: Callable[[S], T], items: Iterable[S], workers: int | None = None, ahead: int | None = None
) -> Generator[T, None, None]:
    """Yield `function(item)` for all items in their order, computed by threads.

    At most `ahead` results wait to be taken, so memory does not grow with the number of items. When the generator is
    closed, it cancels the pending calls and waits for those that are running.

    Args:
        function: must be safe to call from several threads; OpenCV and file reads release the GIL.
        items: the arguments.
        workers: number of threads; one per usable core if None.
        ahead: number of results; four per thread if None.
    """
    workers = workers or usable_cores()
    ahead = ahead or 4 * workers
    with ThreadPoolExecutor(workers) as pool:
        pending: deque[Future[T]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def report_progress(items: Iterable[T], total: int, progress: ProgressCallback) -> Iterator[T]:
    """Yield the items and call `progress` after each."""
    for count, item in enumerate(items, start=1):
        yield item
        progress(count, total)
