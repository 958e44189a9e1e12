"""Settings of the reports of a run (section `log` of the config)."""

from __future__ import annotations

from facetrain.settings import Positive, Settings


class LogSettings(Settings):
    """Reports."""

    every_steps: Positive = 10
    """Number of steps between two reports."""
    report: bool = True
    """Keep `report.html` in the run folder up to date while the run trains. From the second page on, this takes at most
    0.5 % of the run's time."""
    tensorboard: bool = True
    """Write the metrics for TensorBoard, too."""
