"""The command line: every command parses, calls one function, and prints one result."""

from __future__ import annotations

import io
import sys
from typing import Any

_INTERRUPTED = 130


def main() -> None:
    """Run the `facetrain` command; end the process with the exit code that the errors define."""
    # --debug may stand anywhere on the line, also behind the command's own options.
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    import typer

    from facetrain.cli.app import app
    from facetrain.distributed.process_lifetime import end_with_launcher
    from facetrain.errors import FacetrainError, LostRankError

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A result with a × or a name that the terminal's encoding lacks is no reason to fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    end_with_launcher()
    try:
        code = app(arguments, prog_name="facetrain", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except LostRankError as error:
        if debug:
            raise
        sys.exit(error.exit_code)
    except FacetrainError as error:
        if debug:
            raise
        _end(str(error), error.exit_code)
    except Exception as error:
        if debug:
            raise
        _refuse(error)
        said = " ".join(str(error).split())
        _end(f"{type(error).__name__}: {said} (not foreseen; --debug shows where it comes from)", 1)
    if code == _INTERRUPTED:
        _end("interrupted", code)
    sys.exit(code)


def _refuse(error: Any) -> None:
    """End where the command line itself is wrong: what typer raises then has `format_message`, as in click."""
    if not hasattr(error, "format_message"):
        return
    said = " ".join(error.format_message().split()).removesuffix(".")
    if not said:  # no command was given, and the help has been printed
        sys.exit(error.exit_code)
    command = error.ctx.command_path if error.ctx else "facetrain"
    advice = "" if said.endswith("?") else f"; see {command} --help"
    _end(f"{command}: {said[0].lower()}{said[1:]}{advice}", error.exit_code)


def _end(message: str, exit_code: int) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(exit_code)
