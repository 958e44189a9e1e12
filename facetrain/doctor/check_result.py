"""What a check has found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from facetrain.errors import FacetrainError

OK, WARNING, FAILURE = "ok", "warning", "failure"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    status: str
    """ok, warning or failure."""
    found: str
    do: str = ""
    """What helps, where something is wrong."""


def ok(what: str, found: str) -> Finding:
    """Say that something is as it should be."""
    return Finding(what, OK, found)


def warning(what: str, found: str, do: str) -> Finding:
    """Say that something will work, and may cost time or accuracy."""
    return Finding(what, WARNING, found, do)


def failure(what: str, found: str, do: str) -> Finding:
    """Say that training will not work like this."""
    return Finding(what, FAILURE, found, do)


def count(number: int, one: str, many: str = "") -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def look(what: str, check: Callable[..., list[Finding]], *args: Any, **options: Any) -> list[Finding]:
    """Call a check; what it raises on purpose becomes its finding, so that the other checks still run."""
    try:
        return check(*args, **options)
    except (FacetrainError, OSError, RuntimeError) as error:
        # Our own messages say themselves what to do.
        return [failure(what, " ".join(str(error).split()), "")]
