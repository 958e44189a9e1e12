"""`facetrain` and `python -m facetrain`, which torchrun starts on every rank."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from facetrain.signals import EXIT_CODES_OF_SIGNALS, has_to_wait, raise_soon


def main() -> None:
    """Run the command line."""
    if sys.platform != "linux":
        print("error: facetrain runs on Linux; on Windows, use WSL 2", file=sys.stderr)
        sys.exit(2)

    def run() -> None:
        from facetrain.cli.app import main as command_line

        command_line()

    run_program(run)


def run_program(run: Callable[[], None]) -> None:
    """Run a program. A Ctrl-C during its imports, which take a while, is no error of the program either."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise a script ignores Ctrl-C
        signal.signal(signal.SIGINT, _interrupt)
        # The first one registered is the last one called.
        atexit.register(_stop_repeating)
    sys.unraisablehook = _repeat_signal
    # By default, Python searches for cycles after each 700 new objects. The imports make half a million that stay.
    gc.set_threshold(10_000)
    try:
        run()
    except KeyboardInterrupt:
        from facetrain.distributed.process_lifetime import report_interruption

        report_interruption()
        sys.exit(130)
    except SystemExit as ended:
        _leave(ended.code)


def _leave(code: str | int | None) -> NoReturn:
    """End the process: after a failure or a signal at once, without Python's cleanup.

    Python would first wait for the threads of all pools. One of them may wait for a lost rank, a GPU or a disk.
    """
    if not isinstance(code, int) or not code:
        # Not a last search for cycles among all objects of the imported packages either: it takes a second.
        gc.freeze()
        sys.exit(code)
    # `os._exit` drops what the streams still hold.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, where it has to wait later."""
    if not has_to_wait(frame):
        raise KeyboardInterrupt
    raise_soon(number)


def _repeat_signal(ignored: Any) -> None:
    """Repeat a signal that came in a finalizer or another callback in which Python drops exceptions, as in this hook.

    Handlers raise KeyboardInterrupt for a Ctrl-C, and SystemExit with 128 + the number for another signal.
    """
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        raise_soon(signal.SIGINT)
    elif isinstance(ignored.exc_value, SystemExit) and ignored.exc_value.code in EXIT_CODES_OF_SIGNALS:
        raise_soon(ignored.exc_value.code - 128)
    else:
        sys.__unraisablehook__(ignored)


def _stop_repeating() -> None:
    """Leave Ctrl-C to the operating system: Python is about to drop its handlers, and SIGALRM would end the process."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
