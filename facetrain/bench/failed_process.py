"""The reason why a process of a benchmark failed."""

from __future__ import annotations

import re
import subprocess

_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")


def failure_reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return one line: the exception at the end of a traceback, else the last line of stderr, else the exit code."""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    # The message of an exception can have more lines; torch's may end with a lone quotation mark.
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])
