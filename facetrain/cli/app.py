"""The `facetrain` program: its options, and the exit codes and messages of errors.

The modules of the commands import torch only when a command is called, so that help is fast.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from facetrain import __version__, own_parts
from facetrain.cli.commands import Program
from facetrain.cli.standard_streams import OutputError, prepare_standard_streams
from facetrain.distributed.process_lifetime import (
    Mark,
    end_with_launcher,
    forget_other_ranks,
    is_said_by_another,
    launched_by_torchrun,
    leave_exit_code,
    leave_mark,
    report_interruption,
)
from facetrain.distributed.process_setup import (
    bound_spinning,
    set_gpu_defaults,
    silence_matplotlib_logs,
    silence_opencv_logs,
    silence_torch_logs,
)
from facetrain.errors import FacetrainError, LostRankError, UsageError, is_final, is_out_of_memory
from facetrain.files import allow_open_files, error_reason
from facetrain.remote.address import without_secrets
from facetrain.signals import EXIT_CODES_OF_SIGNALS, exit_on_signals
from facetrain.text import printable

_INTERRUPTED = 130
_BROKEN_PIPE = 141
"""128 + SIGPIPE: nothing reads the output any more, as after `facetrain runs | head -1`."""
_HEAD_START_S = 1.0
_ANYWHERE = ("--debug", "--allow-code")
"""Options of the program that are accepted anywhere on the command line."""
_TRAINING = ("train", "resume")
"""Commands that have their own handlers of signals."""
_WRONG_PATH = (errno.ENAMETOOLONG, errno.EACCES)
"""Errors of a path that is only looked for; a missing one is no error then."""

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


def _allow_code(wanted: bool) -> None:
    if wanted:
        own_parts.allow_all()


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            callback=_allow_code,
            help="Run the code (MODULE:NAME) that the config of a run or a model file names. Only for those that you "
            "trust. This option and --debug are accepted anywhere on the command line.",
        ),
    ] = False,
) -> None:
    """Train, verify and export face-recognition models."""
    if context.invoked_subcommand not in _TRAINING:
        exit_on_signals()


def main() -> None:
    """Run the `facetrain` program; end the process with the exit code of the command or of its error."""
    forget_other_ranks()
    run_command()


def run_command() -> None:
    """Run the command of `sys.argv`, in a rank or alone; end the process with its exit code or that of its error."""
    # To the front: these are accepted behind the options of a command, too.
    arguments = sorted(sys.argv[1:], key=lambda argument: argument not in _ANYWHERE)
    debug = "--debug" in arguments
    end_with(lambda: app(arguments, prog_name="facetrain", standalone_mode=False), debug=debug)


def end_with(run: Callable[[], int | None], *, debug: bool) -> None:
    """Run a command, and end the process with its exit code or with that of its error, whose message is printed."""
    prepare_standard_streams()
    end_with_launcher()
    allow_open_files()
    bound_spinning()
    silence_opencv_logs()
    silence_matplotlib_logs()
    if launched_by_torchrun():
        # As facetrain's own launcher does for its ranks.
        silence_torch_logs()
        set_gpu_defaults()
    try:
        code = run()
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except BaseException as error:  # a part of one's own may raise anything
        # After a signal, or as facetrain ends itself. A part that does so has failed: it might end a run with 0.
        ends_itself = isinstance(error, SystemExit) and (
            error.code in EXIT_CODES_OF_SIGNALS or not own_parts.line_of(error)
        )
        if debug or ends_itself:
            raise
        _exit_with_error(error)
    if code == _INTERRUPTED:
        report_interruption()
        leave_exit_code(code)
    sys.exit(code)


def _exit_with_error(error: Any) -> None:
    """Print an exception as one line and end the process with its exit code."""
    if isinstance(error, LostRankError):
        # The rank that failed prints the reason. If this one ended first, the elastic agent would end that one by
        # SIGTERM, perhaps before it has printed.
        time.sleep(_HEAD_START_S)
        sys.exit(error.exit_code)
    if isinstance(error, OutputError) and isinstance(error.__cause__, BrokenPipeError):
        sys.exit(_BROKEN_PIPE)
    if is_final(error):
        leave_mark(Mark.NO_RESTART)
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
        f"{own_parts.line_of(error) or 'internal error'}: {type(error).__name__}: {error_reason(error)}; "
        "run again with --debug for the traceback",
        FacetrainError.exit_code,
    )


def _exit_with_usage_error(error: Any) -> None:
    text = error.format_message()
    if text.startswith("Usage: "):  # no command was given: the message is the help
        print(text, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    command = error.ctx.command_path if error.ctx else "facetrain"
    _exit(f"{command}: {' '.join(text.split())} (see {command} --help)", error.exit_code)


def _exit(message: str, exit_code: int) -> None:
    if "/downloads/" in message or "/datasets/" in message:
        from facetrain.data.remote_dataset import with_addresses

        message = with_addresses(message)
    if not is_said_by_another(message):
        print(f"error: {printable(without_secrets(message))}", file=sys.stderr, flush=True)
    leave_exit_code(exit_code)
    sys.exit(exit_code)
