"""The command line: every command parses, calls one function, and prints one result."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the `facetrain` command; end the process with the exit code that the errors define."""
    # --debug may stand anywhere on the line, also behind the command's own options.
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    from facetrain.cli.app import app
    from facetrain.distributed.parent import end_with_launcher
    from facetrain.errors import FacetrainError, LostRankError

    end_with_launcher()
    try:
        app(arguments)
    except LostRankError as error:
        if debug:
            raise
        sys.exit(error.exit_code)
    except FacetrainError as error:
        if debug:
            raise
        _end(str(error), error.exit_code)
    except KeyboardInterrupt:
        if debug:
            raise
        _end("interrupted", 130)
    except Exception as error:
        if debug:
            raise
        said = " ".join(str(error).split())
        _end(f"{type(error).__name__}: {said} (not foreseen; --debug shows where it comes from)", 1)


def _end(message: str, exit_code: int) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(exit_code)
