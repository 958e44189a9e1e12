"""`facetrain` and `python -m facetrain`, which torchrun starts on every rank."""

import os
import signal
import sys
from types import FrameType
from typing import Any

_CODE = 128 + signal.SIGINT
_MESSAGE = "error: interrupted"
_SOON_S = 0.01


def main() -> None:
    """Run the command line. A Ctrl-C during its imports, which take a while, is no error of the program either."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise a script ignores Ctrl-C
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _repeat_interrupt
    try:
        from facetrain.cli.app import main as run

        run()
    except KeyboardInterrupt:
        print(_MESSAGE, file=sys.stderr, flush=True)
        sys.exit(_CODE)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the process during an import, otherwise raise KeyboardInterrupt."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            # Not by an exception: C++ modules abort if one is raised while they are loaded.
            os.write(2, f"{_MESSAGE}\n".encode())
            os._exit(_CODE)
        frame = frame.f_back
    raise KeyboardInterrupt


def _repeat_interrupt(ignored: Any) -> None:
    """Repeat a Ctrl-C in a finalizer or in another callback in which Python drops exceptions."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    # Later, because Python would drop an exception of this hook as well.
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, _SOON_S)


if __name__ == "__main__":
    main()
