"""What every tool needs: all cores, results in order, a folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from facetrain.cpu_cores import usable_cores
from facetrain.errors import DataError

Progress = Callable[[int, int], None]
"""Called with how much is done, and of how much."""
T = TypeVar("T")


def silent(done: int, total: int) -> None:
    """Show no progress."""


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder aside that becomes `output` when all went well, and is gone when not.

    Raises:
        DataError: `output` is there already, or the disk refuses.
    """
    if output.exists():
        raise DataError(f"{output}: is there already; remove it, or write into another folder")
    scratch = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        scratch.mkdir(parents=True)
        yield scratch
        os.replace(scratch, output)
    except OSError as error:
        raise DataError(f"{error.filename or output}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def in_order(
    work: Callable[[int], T], numbers: Iterable[int], workers: int | None
) -> Generator[T, None, None]:
    """Do work for numbers on all cores, a little ahead of whoever takes the results; closed, none is left at work."""
    ahead = 4 * (workers or usable_cores())
    with ThreadPoolExecutor(workers or usable_cores()) as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for number in numbers:
                waiting.append(pool.submit(work, int(number)))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def counted(items: Iterable[T], total: int, progress: Progress, *, done: int = 0) -> Iterator[T]:
    """Pass items on, and tell of each; `done` says how many there were before."""
    for count, item in enumerate(items, start=done + 1):
        yield item
        progress(count, total)
