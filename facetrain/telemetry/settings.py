"""Settings of the reports of a run (section `log` of the config)."""

from __future__ import annotations

from typing import Annotated

from facetrain.settings import OneOf, OwnPart, Positive, Settings
from facetrain.telemetry.sink import SINKS


class LogSettings(Settings):
    """Reports."""

    every_steps: Positive = 10
    """Number of steps between two reports."""
    report: bool = True
    """Keep `report.html` in the run folder up to date while the run trains. From the second page on, this takes at most
    0.5 % of the run's time."""
    sinks: tuple[Annotated[str, OneOf(SINKS, own=True)] | OwnPart, ...] = ("tensorboard",)
    """Programs that get the metrics of `metrics.jsonl`, too: TensorBoard, by files in the run folder, and Weights &
    Biases, which needs the extra `[wandb]`; and sinks of your own, MODULE:NAME, or {type: MODULE:NAME, options: …}."""
