"""Result of one check of `facetrain doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from facetrain.errors import FacetrainError
from facetrain.files import error_reason


@dataclass(frozen=True)
class CheckResult:
    """One line of the report."""

    check: str
    status: Literal["ok", "warning", "failure"]
    message: str
    advice: str = ""
    """What to do about a warning or a failure."""
    certainty: str = ""
    """certain, likely or possible, for a conclusion from the data; empty for a measurement."""


def passed(check: str, message: str) -> CheckResult:
    """Return the result of a check that found nothing wrong."""
    return CheckResult(check, "ok", message)


def warning(check: str, message: str, advice: str, certainty: str = "") -> CheckResult:
    """Return the result of a check after which training works, but may cost time or accuracy."""
    return CheckResult(check, "warning", message, advice, certainty)


def failed(check: str, message: str, advice: str) -> CheckResult:
    """Return the result of a check after which training cannot work."""
    return CheckResult(check, "failure", message, advice)


def warned_if(has_problem: bool, check: str, message: str, advice: str) -> CheckResult:
    """Return a warning if the check has found a problem, else that it found nothing wrong; both with the message."""
    return warning(check, message, advice) if has_problem else passed(check, message)


@contextmanager
def errors_as_failures(results: list[CheckResult], check: str) -> Iterator[None]:
    """Add an expected error within the block to the results, as a failure, so that the other checks still run."""
    try:
        yield
    except (FacetrainError, OSError, RuntimeError) as error:
        # The message of a FacetrainError already contains the advice.
        message = str(error) if isinstance(error, FacetrainError) else error_reason(error)
        results.append(failed(check, " ".join(message.split()), ""))
