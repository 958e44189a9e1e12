"""Report of a run on its leader, kept up to date while the run trains."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from facetrain.data.tools.contact_sheet import write_batch_sheet
from facetrain.errors import FacetrainError, RunError
from facetrain.files import os_errors_as
from facetrain.run.folder.run_files import AUGMENTED_FILE, METRICS_FILE, REPORT_FILE
from facetrain.run.report.history import History
from facetrain.run.report.page import write_run_report
from facetrain.telemetry.jsonl import GrowingJsonLines
from facetrain.telemetry.log import logger, warn
from facetrain.training.state import TrainState

_SHARE = 0.005
"""Largest share of the run's time that its pages take from the second one on."""
_SECOND_AFTER_S = 30.0
"""Seconds from the first page, which has no curves, to the second one."""


@dataclass
class LiveReport:
    """Writes report.html after the first step, then as often as a small share of the time allows, and at the end."""

    folder: Path
    _next_at: float = field(default=0.0, init=False)
    _history: History = field(default_factory=History, init=False)
    _lines: GrowingJsonLines = field(init=False)

    def __post_init__(self) -> None:
        self._lines = GrowingJsonLines(self.folder / METRICS_FILE)

    def update(self, state: TrainState) -> None:
        """Write the page if it is due. Called after every step."""
        began_at = time.monotonic()
        if began_at >= self._next_at:
            self.write("; training continues")
            state.meter.exclude(time.monotonic() - began_at)  # images per second count training alone

    def write(self, remark: str = "") -> None:
        """Write the page; also called at the end, after the state of the run has been recorded.

        `remark` ends the warning of a page that cannot be written.
        """
        began_at, is_first = time.monotonic(), not self._next_at
        try:
            with os_errors_as(RunError, self.folder):
                self._history.extend(self._lines)
            write_run_report(self.folder, self.folder / REPORT_FILE, self._history)
        except FacetrainError as error:
            warn(f"{error}{remark}")
        except Exception:  # any error of a plotting library: it must not end days of training
            logger.warning("%s was not written", REPORT_FILE, exc_info=True)
        now = time.monotonic()
        # Not by the cost of the first page, which imports matplotlib.
        self._next_at = now + (_SECOND_AFTER_S if is_first else (now - began_at) / _SHARE)


def write_first_batch(folder: Path, image_BCHW: Tensor) -> None:
    """Write the first images of a run as its network gets them, unless an earlier start of the run has."""
    path = folder / AUGMENTED_FILE
    if path.exists():
        return
    try:
        write_batch_sheet(image_BCHW, path)
    except FacetrainError as error:
        warn(f"{error}; training continues")
