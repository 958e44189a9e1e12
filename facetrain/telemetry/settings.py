"""Settings of the reports of a run (section `log` of the config)."""

from __future__ import annotations

from typing import Annotated

from facetrain.settings import OneOf, OwnPart, Positive, Settings
from facetrain.telemetry.sink import SINKS


class LogSettings(Settings):
    """How often a run reports, and where to."""

    every_steps: Positive = 10
    """Number of steps between two reports."""
    report: bool = True
    """Keep `report.html` in the run folder up to date while the run trains. From the second page on, this takes at most
    0.5 % of the run's time."""
    tensorboard: bool = True
    """Write the metrics for TensorBoard, too, into `tensorboard/` in the run folder."""
    sinks: tuple[Annotated[str, OneOf(SINKS, own=True)] | OwnPart, ...] = ()
    """Further programs that get the metrics: wandb, Weights & Biases, which needs the extra `[wandb]`; and sinks of
    your own, MODULE:NAME, or {type: MODULE:NAME, options: …}."""
