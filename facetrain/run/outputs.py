"""Outputs of a run while it trains: console, log.txt, metrics.jsonl and the sinks of `log.sinks`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facetrain.config.loading import plain_config
from facetrain.config.schema import Config
from facetrain.errors import RunError
from facetrain.files import os_errors_as
from facetrain.run.folder.run_files import (
    AUGMENTED_FILE,
    DIVERGED_FILE,
    LEFT_OUT_FILE,
    METRICS_FILE,
    PAIRS_FILE,
    SKIPPED_FILE,
    name_of_run,
)
from facetrain.telemetry.console import Console
from facetrain.telemetry.jsonl import JsonLines
from facetrain.telemetry.log import logger
from facetrain.telemetry.sink import LoggedRun, Sink, Sinks
from facetrain.verify.output.hardest_pairs import read_verified_pairs


@dataclass(frozen=True)
class RunOutputs:
    """Outputs of this rank while a run trains. Only the leader has metrics and a console; every rank has a log."""

    journal: JsonLines | None = None
    """metrics.jsonl."""
    console: Console | None = None
    sinks: Sink | None = None

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write the metrics of a step."""
        for sink in (self.journal, self.console, self.sinks):
            if sink:
                sink.write(step, values)

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
        if self.journal:
            self.journal.sync()

    def close(self) -> None:
        """Close all outputs but the log and the sinks, which may take long."""
        for sink in (self.journal, self.console):
            if sink:
                sink.close()


def open_sinks(config: Config, folder: Path, run_id: str, resume_at: int | None) -> Sinks | None:
    """Open the sinks of a run, before its folder is changed; None if it has none. For the leader only.

    Raises:
        UsageError: a sink needs a package that is not installed, or does not take its options.
    """
    # TensorBoard last: it hides the records after a resume, and must not if another sink refuses the resume.
    sinks = [*config.log.sinks, *["tensorboard"] * config.log.tensorboard]
    run = LoggedRun(folder, name_of_run(folder), run_id, plain_config(config), resume_at)
    return Sinks(sinks, run) if sinks else None


def open_outputs(folder: Path, sinks: Sinks | None, *, total_steps: int, resume_at: int | None) -> RunOutputs:
    """Open the other outputs of a run. For the leader only.

    A resumed run drops the records and files of what came after the step that it continues from. A new one drops those
    of a run that has ended in the folder before its first checkpoint.

    Args:
        folder: run folder.
        sinks: the sinks of the run.
        total_steps: last step of the run.
        resume_at: step from which the run continues; None for a new run.

    Raises:
        RunError: metrics.jsonl cannot be written.
    """
    with os_errors_as(RunError, folder):
        for name in _files_of_another_course(folder, resume_at):
            (folder / name).unlink(missing_ok=True)
    journal = JsonLines(folder / METRICS_FILE, resume_at=resume_at)
    return RunOutputs(journal, Console(total_steps=total_steps, start_step=resume_at or 0), sinks)


def _files_of_another_course(folder: Path, resume_at: int | None) -> tuple[str, ...]:
    """Return the names of the files in a run folder that this start would seem to have written."""
    if resume_at is None:
        return (DIVERGED_FILE, SKIPPED_FILE, LEFT_OUT_FILE, AUGMENTED_FILE, PAIRS_FILE)
    pairs = read_verified_pairs(folder / PAIRS_FILE)
    return (DIVERGED_FILE, PAIRS_FILE) if pairs and pairs.step > resume_at else (DIVERGED_FILE,)
