"""Standard output and standard error of a command, which can be closed, broken or on a full disk."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, NoReturn

from facetrain.errors import RunError

_INPUT, _OUTPUT, _ERROR = 0, 1, 2


class OutputError(RunError):
    """Standard output cannot take a result."""


class MessageStream(io.TextIOWrapper):
    """Standard error. Messages that it cannot take are lost: a run must not end because no program can read them."""

    def write(self, text: str) -> int:
        """Write a text if possible; return its length."""
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Write what is buffered if possible."""
        try:
            super().flush()
        except OSError:
            return


class ResultStream(io.TextIOWrapper):
    """Standard output. A result that it cannot take is an error of one line."""

    def write(self, text: str) -> int:
        """Write a text; return its length.

        Raises:
            OutputError: the stream is broken, or its disk is full.
        """
        if text == "":  # typer writes it to see what the stream takes, and ignores errors
            return 0
        try:
            return super().write(text)
        except OSError as error:
            self._give_up(error)

    def flush(self) -> None:
        """Write what is buffered.

        Raises:
            OutputError: the stream is broken, or its disk is full.
        """
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> NoReturn:
        # What is buffered must not fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        raise OutputError(f"standard output: {error.strerror}; the result is not complete") from error


def prepare_standard_streams() -> None:
    """Replace `sys.stdout` and `sys.stderr` of the program by streams that are never None."""
    for number in (_INPUT, _OUTPUT, _ERROR):
        try:
            os.fstat(number)
        except OSError:
            # Otherwise the next file that is opened would get this number, and all messages.
            os.open(os.devnull, os.O_RDWR)
    # Streams that a calling program has put in their place stay.
    if sys.stdout is sys.__stdout__:
        sys.stdout = _wrapped(ResultStream, sys.stdout, _OUTPUT)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _wrapped(MessageStream, sys.stderr, _ERROR)


def _wrapped(
    kind: type[MessageStream | ResultStream], stream: Any, number: int
) -> MessageStream | ResultStream:
    # A × or a name that the terminal's encoding lacks must not fail the command.
    if stream is None:
        return kind(open(number, "wb", closefd=False), errors="backslashreplace")
    return kind(
        stream.buffer,
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
