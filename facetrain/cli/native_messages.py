"""Messages that C libraries such as libjpeg print on standard error, turned into a few warnings at the end."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from facetrain.cli.standard_streams import MessageStream

_MAX_KINDS = 5


@contextmanager
def collect_native_messages() -> Iterator[None]:
    """Collect what is written to file descriptor 2, not to `sys.stderr`, and print each kind of message once.

    libjpeg prints a line for each image that it had to guess a part of, without the name of the image. Thousands of
    them hide the messages of the command.
    """
    terminal, python_stderr = os.dup(2), sys.stderr
    with (
        tempfile.TemporaryFile() as collected,
        # Unbuffered: at its end, a buffer would fail once more with what it could not write.
        MessageStream(
            os.fdopen(os.dup(terminal), "wb", buffering=0),
            encoding=python_stderr.encoding,
            errors="backslashreplace",
            line_buffering=True,
        ) as stderr,
    ):
        sys.stderr = stderr
        os.dup2(collected.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            sys.stderr = python_stderr
            collected.seek(0)
            for line in _summary(collected.read().decode("utf-8", "replace").splitlines()):
                print(line, file=sys.stderr)


def _summary(lines: list[str]) -> list[str]:
    """Return one line per kind of message; messages that differ in numbers only are of one kind."""
    kinds: dict[str, list[str]] = {}
    for line in filter(str.strip, lines):
        kinds.setdefault(re.sub(r"0x[0-9a-f]+|[0-9]+", "N", line), []).append(line)
    summary = [
        f"warning: an image library reports: {found[0].strip()}"
        + (f" ({len(found):,} such messages)" if len(found) > 1 else "")
        for found in list(kinds.values())[:_MAX_KINDS]
    ]
    return summary + (["warning: … and other messages"] if len(kinds) > _MAX_KINDS else [])
