"""Outputs of a run while it trains: console, metrics.jsonl, TensorBoard and the optional services."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from facetrain.config.loading import dump_config, plain_config
from facetrain.config.schema import Config
from facetrain.errors import RunError
from facetrain.files import os_errors_as
from facetrain.telemetry.console import Console
from facetrain.telemetry.jsonl import JsonLines
from facetrain.telemetry.log import logger
from facetrain.telemetry.recorder import OptionalSink, Recorder, RunEnd, Sink
from facetrain.telemetry.tensorboard import TensorBoard
from facetrain.telemetry.wandb import WandB

DIVERGED_FILE, SKIPPED_FILE = "diverged.json", "skipped_images.txt"
AUGMENTED_FILE, PAIRS_FILE, REPORT_FILE = "augmented.png", "hardest_pairs.json", "report.html"


@dataclass(frozen=True)
class RunOutputs:
    """Outputs of this rank while a run trains. Only the leader has metrics and a console; every rank has a log."""

    recorder: Sink = field(default_factory=Recorder)
    """metrics.jsonl, the console, TensorBoard and the optional services."""
    console: Console | None = None

    def print(self, line: str) -> None:
        """Print a line to the console, or write it to the log of a rank that has no console."""
        if self.console:
            self.console.print(line)
        else:
            logger.info(line)

    def report(self, line: str) -> None:
        """Write a line to the log, and on the leader to the console too."""
        logger.info(line)
        if self.console:
            self.console.print(line)

    def warn(self, line: str) -> None:
        """Write a warning to the log, and on the leader to the console too."""
        logger.warning(line)
        if self.console:
            self.console.print(f"warning: {line}")

    def advance(self, step: int, activity: str = "") -> None:
        """Move the progress bar of the leader to a step, or show what the run does instead of the next one."""
        if self.console:
            self.console.advance(step, activity)

    def sync(self) -> None:
        """Wait until all metrics are on the disk. For any thread.

        Raises:
            OSError: they cannot be written.
        """
        self.recorder.sync()

    def close(self, end: RunEnd) -> None:
        """Close all outputs but the log. `end` is how the run has ended."""
        self.recorder.close(end)


def open_outputs(
    config: Config, folder: Path, *, run_id: str, total_steps: int, resume_at: int | None
) -> RunOutputs:
    """Open the outputs of a run. For the leader only.

    A resumed run drops the records after the step that it continues from. A new one drops the records of a run that
    has ended in the folder before its first checkpoint.

    Args:
        config: config of the run.
        folder: run folder. TensorBoard and the services get its name as the name of the run.
        run_id: id of the run, for every record of metrics.jsonl.
        total_steps: last step of the run.
        resume_at: step from which the run continues; None for a new run.
    """
    # A run that failed before its first checkpoint leaves these files, and the new one would seem to have written them.
    if resume_at is None:
        with os_errors_as(RunError, folder):
            for name in (DIVERGED_FILE, SKIPPED_FILE, AUGMENTED_FILE, PAIRS_FILE):
                (folder / name).unlink(missing_ok=True)
    # metrics.jsonl first: it must have a record even if a later sink fails.
    journal = JsonLines(folder / "metrics.jsonl", resume_at=resume_at, run_id=run_id)
    console = Console(total_steps=total_steps, start_step=resume_at or 0)
    sinks = [journal, console, *_optional_sinks(config, folder, resume_at)]
    return RunOutputs(Recorder(*sinks), console)


def _optional_sinks(config: Config, folder: Path, resume_at: int | None) -> Iterator[Sink]:
    """Open TensorBoard and the services that the config has."""
    log, name = config.log, folder.resolve().name
    if log.tensorboard:
        # In a folder with the name of the run, because TensorBoard names a run after its folder below --logdir.
        board = TensorBoard(folder / "tensorboard" / name, resume_at=resume_at)
        board.show_text(resume_at or 0, "config", dump_config(config))
        yield board
    # The run appears in the services under the name of its folder, with its whole config.
    described: dict[str, Any] = {
        "name": name,
        "config": plain_config(config),
        "resumed": resume_at is not None,
    }
    if log.wandb is not None:
        yield OptionalSink("log.wandb", partial(WandB, folder, project=log.wandb, **described))
