"""Start of helper processes that do not import the main module of the program.

The spawn method of `multiprocessing` runs the main module of the parent again in every child, as `__mp_main__`. A
script without `if __name__ == "__main__":` would start its training again there, and a program on standard input has
no file to run. The helpers of facetrain call functions of facetrain only, so they need no main module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from threading import Lock
from types import ModuleType

_REPLACING = Lock()


class HelperProcess(SpawnProcess):
    """Process whose target and arguments are pickled, and belong to an importable module."""

    def start(self) -> None:
        """Start the process."""
        with _empty_main_module():
            super().start()


class HelperContext(SpawnContext):
    """Context of `multiprocessing` that starts helper processes; also for ProcessPoolExecutor."""

    Process = HelperProcess


@contextmanager
def _empty_main_module() -> Iterator[None]:
    """Replace the main module by an empty one, which has no file or name that a child could import."""
    with _REPLACING:  # two threads that start processes would restore each other's module
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
