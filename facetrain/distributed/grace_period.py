"""Grace period: the time from a signal to the end by force of a process that still runs."""

from __future__ import annotations

import os
import re

from facetrain.errors import UsageError

_VARIABLE, _TORCHRUN_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"
_DEFAULT_S = "300"
"""Grace period of facetrain's own start: enough to write a checkpoint of several GiB."""


def set_default_grace_period() -> None:
    """Set the grace period of this process and of the ranks that it starts, unless the environment has one.

    Raises:
        UsageError: as `grace_s`.
    """
    # In the environment, where torch's agent and the ranks read it.
    os.environ.setdefault(_VARIABLE, _DEFAULT_S)
    grace_s()


def grace_s() -> int:
    """Return the grace period in seconds.

    Raises:
        UsageError: the environment variable that sets it is not a whole number.
    """
    seconds = os.environ.get(_VARIABLE, _TORCHRUN_S)
    if not re.fullmatch("[0-9]{1,9}", seconds):
        raise UsageError(f"{_VARIABLE}: {seconds!r} is not a whole number of seconds; use for example 240")
    return int(seconds)
