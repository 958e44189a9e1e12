"""Reader of TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_events(folder: Path) -> Any:
    """Return an EventAccumulator with all scalars of a folder's event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    return events.Reload()
