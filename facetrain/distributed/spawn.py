"""Start of helper processes that import neither the main module of the program nor files of the current folder.

A helper never sees Ctrl-C, which a terminal sends to all processes: the process that started it decides what ends.

The spawn method of `multiprocessing` runs the main module of the parent again in every child, as `__mp_main__`. A
script without `if __name__ == "__main__":` would start its training again there, and a program on standard input has
no file to run. The helpers of facetrain call functions of facetrain only, so they need no main module.

The method starts a child by `python -c`, which looks for modules in the current folder first: until the child has the
search path of its parent, a file there would replace a module of Python.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from threading import Lock, current_thread, main_thread
from types import FrameType, ModuleType

GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that reach the whole process group: of Ctrl-C, of a scheduler, of the end of a terminal. A training process
decides how to stop, and needs its helpers until its last checkpoint."""
_STARTING = Lock()
"""Held during a start: of two threads, each would restore what the other one has replaced."""
_SAFE_PATH = "PYTHONSAFEPATH"


class HelperProcess(SpawnProcess):
    """Process whose target and arguments are pickled, and belong to an importable module."""

    def start(self) -> None:
        """Start the process. It never gets SIGINT, nor the other signals that are blocked in this thread."""
        with (
            _interrupt_deferred(),
            signals_blocked(signal.SIGINT),
            _STARTING,
            _safe_path(),
            _empty_main_module(),
        ):
            super().start()


class HelperContext(SpawnContext):
    """Context of `multiprocessing` that starts helper processes; also for ProcessPoolExecutor."""

    Process = HelperProcess

    def __init__(self) -> None:
        super().__init__()
        # multiprocessing's resource tracker starts with the first queue or process, and serves all later ones. Left to
        # itself, it dies of SIGUSR1 and SIGHUP, and unblocks SIGINT and SIGTERM in this thread (before Python 3.12).
        with _interrupt_deferred(), signals_blocked(*GROUP_SIGNALS), _STARTING, _safe_path():
            resource_tracker.ensure_running()


@contextmanager
def signals_blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals in this thread, and for ever in the processes that it starts meanwhile.

    A process that ignores a signal only from its own first line on would die of one that comes before.
    """
    # A process inherits the mask of the thread that starts it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Handle a Ctrl-C after the block: in the middle of a start, it would leave a process without its arguments."""
    # Python runs handlers in the main thread only.
    handler = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or not callable(handler):
        yield
        return
    received: list[FrameType | None] = []
    # A blocked signal is not enough: the kernel gives it to another thread, and Python's handler runs in this one.
    signal.signal(signal.SIGINT, lambda _, frame: received.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received:
        handler(signal.SIGINT, received[0])


@contextmanager
def _safe_path() -> Iterator[None]:
    """Keep the current folder out of the search path with which processes start meanwhile."""
    if sys.flags.safe_path or os.environ.get(_SAFE_PATH):  # they inherit it
        yield
        return
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        # Programs that the user's code starts may need modules beside them.
        del os.environ[_SAFE_PATH]


@contextmanager
def _empty_main_module() -> Iterator[None]:
    """Replace the main module by an empty one, which has no file or name that a child could import."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
