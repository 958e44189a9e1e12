"""`facetrain` and `python -m facetrain`, which torchrun starts on every rank."""

import signal
import sys
from typing import Any

_SOON_S = 0.01


def main() -> None:
    """Run the command line. A Ctrl-C during its imports, which take a while, is no error of the program either."""
    sys.unraisablehook = _repeat_interrupt
    try:
        from facetrain.cli.app import main as run

        run()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        sys.exit(130)


def _repeat_interrupt(ignored: Any) -> None:
    """Repeat a Ctrl-C in a finalizer or in a callback of the import system, where Python drops exceptions."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    # Later, because Python would drop an exception of this hook as well.
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, _SOON_S)


if __name__ == "__main__":
    main()
