"""Grace period: the time from a signal to the end by force of a process that still runs."""

from __future__ import annotations

import os
import re

from facetrain.distributed.process_lifetime import has_agent
from facetrain.errors import UsageError

_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_DEFAULT_S = "300"
"""Enough to write a checkpoint of several GiB."""
_AGENT_S = "30"
"""What torch's agent allows if the variable is not set."""


def export_grace_period() -> None:
    """Set the environment variable for torch's agent in this process, and for the ranks that it starts.

    Raises:
        UsageError: as `grace_s`.
    """
    os.environ[_VARIABLE] = str(grace_s())


def grace_s() -> int:
    """Return the grace period in seconds: of this process, and of the ranks that it starts.

    Raises:
        UsageError: the environment variable that sets it is not a whole number.
    """
    seconds = os.environ.get(_VARIABLE, _AGENT_S if has_agent() else _DEFAULT_S)
    if not re.fullmatch("[0-9]{1,9}", seconds):
        raise UsageError(f"{_VARIABLE}: {seconds!r} is not a whole number of seconds; use for example 240")
    return int(seconds)
