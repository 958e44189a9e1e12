"""The `facetrain` program: its options, and the exit codes and messages of errors.

`facetrain --help` imports no command, and the modules of the commands import torch only when a command is called.
"""

from __future__ import annotations

import errno
import re
import sys
import time
from contextlib import suppress
from typing import Annotated, Any

import typer

from facetrain import __version__
from facetrain.cli.commands import Program
from facetrain.cli.standard_streams import OutputError, prepare_standard_streams
from facetrain.distributed.process_lifetime import (
    end_with_launcher,
    exit_process,
    forbid_restart,
    launched_by_torchrun,
)
from facetrain.distributed.process_setup import silence_torch_logs
from facetrain.errors import DataError, FacetrainError, LostRankError, UsageError, is_out_of_memory
from facetrain.files import error_reason, printable
from facetrain.remote.address import without_secrets

_INTERRUPTED = 130
_BROKEN_PIPE = 141
"""128 + SIGPIPE: nothing reads the output any more, as after `facetrain runs | head -1`."""
_HEAD_START_S = 1.0
_WRONG_PATH = (errno.ENAMETOOLONG, errno.EACCES)
"""Errors of a path that is only looked for; a missing one is no error then."""
_EXPECTED = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "greater_than_equal": "a number of at least {ge}",
    "greater_than": "a number greater than {gt}",
    "less_than_equal": "a number of at most {le}",
    "less_than": "a number less than {lt}",
}
"""Kind of a fault that pydantic finds in an option -> what the option needs."""
_CONFIG_FILE = re.compile(r"[^-=][^=]*\.(ya?ml|py)")

app = typer.Typer(
    name="facetrain",
    cls=Program,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Print the traceback of an error. Accepted anywhere on the command line."
        ),
    ] = False,
) -> None:
    """Train, verify and export face-recognition models, on one CPU or on many GPUs."""


def main() -> None:
    """Run the `facetrain` program; end the process with the exit code of the command or of its error."""
    # Removed before typer parses: --debug is accepted behind the options of a command, too.
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    prepare_standard_streams()
    end_with_launcher()
    if launched_by_torchrun():
        silence_torch_logs()  # facetrain's own launcher does so for its ranks
    try:
        code = app(arguments, prog_name="facetrain", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except Exception as error:
        if debug:
            raise
        _exit_with_error(error)
    if code == _INTERRUPTED:
        _exit("interrupted", code)
    sys.exit(code)


def _exit_with_error(error: Any) -> None:
    """Print an exception as one line and end the process with its exit code."""
    if isinstance(error, LostRankError):
        # The rank that failed prints the reason. If this one ended first, the elastic agent would end that one by
        # SIGTERM, perhaps before it has printed.
        time.sleep(_HEAD_START_S)
        exit_process(error.exit_code)
    if isinstance(error, OutputError) and isinstance(error.__cause__, BrokenPipeError):
        sys.exit(_BROKEN_PIPE)
    if isinstance(error, UsageError) and not isinstance(error, DataError):
        forbid_restart()  # not after a DataError: a file system or a store may come back
    if isinstance(error, FacetrainError):
        _exit(str(error), error.exit_code)
    if hasattr(error, "format_message"):  # an exception of typer or click: the command line is wrong
        _exit_with_usage_error(error)
    if isinstance(error, OSError) and error.errno in _WRONG_PATH and error.filename is not None:
        _exit(f"{error.filename}: {error_reason(error)}", UsageError.exit_code)
    if is_out_of_memory(error):
        _exit(
            f"too little memory ({error_reason(error)}); use a smaller batch, or a machine with more memory",
            FacetrainError.exit_code,
        )
    _exit(
        f"internal error: {type(error).__name__}: {error_reason(error)}; "
        "run again with --debug for the traceback",
        FacetrainError.exit_code,
    )


def _exit_with_usage_error(error: Any) -> None:
    text = error.format_message()
    if text.startswith("Usage: "):  # no command was given: the message is the help
        print(text, file=sys.stderr, flush=True)
        exit_process(error.exit_code)
    message = _in_our_words(" ".join(text.split()).removesuffix("."), error.__cause__)
    command = error.ctx.command_path if error.ctx else "facetrain"
    advice = "" if message.endswith("?") else f"; see {command} --help"
    asks_config = "--config" in getattr(getattr(error, "param", None), "opts", ())
    if (asks_config or "unexpected extra argument" in message) and (stray := _stray_config()):
        advice = f"; did you mean --config {stray}?"
    _exit(f"{command}: {message[0].lower()}{message[1:]}{advice}", error.exit_code)


def _in_our_words(message: str, cause: Any) -> str:
    """Replace pydantic's description of an invalid value, which does not repeat the value."""
    for fault in cause.errors() if hasattr(cause, "errors") else ():
        if fault["type"] in _EXPECTED:
            expected = _EXPECTED[fault["type"]].format_map(fault.get("ctx", {}))
            message = message.replace(fault["msg"], f"{str(fault['input'])!r}; use {expected}")
    # pydantic's prefix of a message that is not its own, and a useless guess of click
    return message.replace("Value error, ", "").replace(" (Possible options: --help)", "")


def _stray_config() -> str | None:
    """Return the first argument that may be a config without --config in front of it; None if there is none."""
    from facetrain.config.presets import presets

    names = {preset.name for preset in presets()}
    return next((name for name in sys.argv[2:] if name in names or _CONFIG_FILE.fullmatch(name)), None)


def _exit(message: str, exit_code: int) -> None:
    if "/downloads/" in message or "/datasets/" in message:
        from facetrain.data.remote_dataset import with_addresses

        with suppress(OSError):  # a user without a home folder has no downloads
            message = with_addresses(message)
    print(f"error: {printable(without_secrets(message))}", file=sys.stderr, flush=True)
    exit_process(exit_code)
