"""Messages and files of a run beside its checkpoints: metrics, opening lines, skipped files, results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facetrain.backbone.low_rank import merge_adapters, trained_share
from facetrain.data.dataset import skipped_files
from facetrain.data.dataset_card import card_text, read_cards, read_copied_cards
from facetrain.data.loading.staged_loader import TrainLoader
from facetrain.data.skipped_files import skipped_summary, skipped_table
from facetrain.errors import DivergedError, RunError
from facetrain.files import error_reason, os_errors_as, printable, write_atomically
from facetrain.models.model_file import AVERAGE_FILE, MODEL_FILE, STEP_KEY, save_model
from facetrain.run.build.backbone import describe_model
from facetrain.run.callbacks.logging import open_recorder
from facetrain.run.prepare import PreparedRun
from facetrain.run.report.curves import plot_curves
from facetrain.run.report.summary import summarize
from facetrain.telemetry.console import Console
from facetrain.telemetry.jsonl import JsonLines
from facetrain.telemetry.log import logger, warn
from facetrain.telemetry.recorder import Recorder, RunEnd
from facetrain.training.state import averaged_state

_CARDS_FILE = "dataset_cards.yaml"
"""File of the run folder with the cards of the training data."""
_DIVERGED_FILE, _SKIPPED_FILE, _SPIKES_FILE = "diverged.json", "skipped_images.txt", "loss_spikes.jsonl"


@dataclass(frozen=True)
class RunOutputs:
    """Outputs of this rank while a run trains. Only the leader has metrics and a console; every rank has a log."""

    recorder: Recorder
    """metrics.jsonl, the console, TensorBoard and the optional services."""
    spike_recorder: Recorder
    """loss_spikes.jsonl."""
    console: Console | None

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

    def sync(self) -> None:
        """Wait until all metrics and loss spikes are on the disk. For any thread.

        Raises:
            OSError: they cannot be written.
        """
        self.recorder.sync()
        self.spike_recorder.sync()

    def close(self, end: RunEnd) -> None:
        """Close all outputs but the log. `end` is how the run has ended."""
        self.recorder.close(end)
        self.spike_recorder.close(end)


def open_outputs(run: PreparedRun) -> RunOutputs:
    """Open the outputs of this rank.

    A resumed run drops the records after the step that it continues from. A new one drops those of a run that has ended
    in the folder before its first checkpoint.
    """
    if not run.world.is_leader:
        return RunOutputs(Recorder(), Recorder(), None)
    if not run.resumed:
        with os_errors_as(RunError, run.folder):
            for name in (_DIVERGED_FILE, _SKIPPED_FILE, _SPIKES_FILE):
                (run.folder / name).unlink(missing_ok=True)
    console = Console(total_steps=run.schedule.total_steps, start_step=run.state.step)
    resume_at = run.state.step if run.resumed else None
    recorder = open_recorder(run.config, run.folder, console, run_id=run.run_id, resume_at=resume_at)
    finds_spikes = run.state.spike_detector is not None
    spikes = JsonLines(run.folder / _SPIKES_FILE, resume_at=resume_at) if finds_spikes else None
    return RunOutputs(recorder, Recorder(journal=spikes), console)


def report_start(run: PreparedRun, outputs: RunOutputs) -> None:
    """Report what a run begins with, and copy the cards of its data to the run folder. For the leader only."""
    outputs.report(_opening_line(run))
    _report_config_changes(run, outputs)
    report_skipped_files(run, outputs.print)
    # The cards beside the data may change.
    write_atomically(run.folder / _CARDS_FILE, card_text(read_cards(Path(run.config.data.train))))


def _opening_line(run: PreparedRun) -> str:
    """Return the first line of a run: its data, its network, its steps, and where it computes."""
    config, world, schedule, step = run.config, run.world, run.schedule, run.state.step
    verified = _float32(run)
    trained = verified if config.train.precision == "fp32" else config.train.precision
    batches = sorted({stage.global_batch_size for stage in schedule.stages})
    sizes = f"{batches[0]:,}" + (f" to {batches[-1]:,}" if len(batches) > 1 else "")
    return (
        f"{run.folder}: {run.source.num_images:,} images of {run.source.num_classes:,} identities; "
        f"{config.model.backbone}{_remark(run)}, {config.head.margin.type}; {schedule.total_steps:,} steps of "
        f"{sizes} images on {world.size} × {world.device.type} in {trained}"
        + (f", verified in {verified}" if run.sets and verified != trained else "")
        + f"; {run.state.network.describe_execution()}"
        + (f"; resuming from step {step:,}" if step else "")
    )


def _float32(run: PreparedRun) -> str:
    """Return the name of float32 arithmetic in this run."""
    return (
        "fp32 (convolutions in TF32)" if run.world.device.type == "cuda" and run.config.train.tf32 else "fp32"
    )


def _remark(run: PreparedRun) -> str:
    """Return a remark about low-rank adapters, if there are any."""
    lora = run.config.model.lora
    if lora is None:
        return ""
    return f" with adapters of rank {lora.rank} ({trained_share(run.state.backbone):.2%} of its parameters)"


def _report_config_changes(run: PreparedRun, outputs: RunOutputs) -> None:
    """Report every config key whose value is not that of the checkpoint: printed, in log.txt and in metrics.jsonl."""
    for change in run.changes:
        outputs.report(f"config changed since the checkpoint of step {run.state.step}: {change}")
        outputs.recorder.note(
            run.state.step, {"config_key": change.key, "before": change.before, "now": change.now}
        )


def report_skipped_files(run: PreparedRun, print_message: Callable[[str], None]) -> None:
    """Print the counts of the files of the dataset that are not images of it, and list them in the run folder."""
    skipped = skipped_files(run.source)
    if skipped:
        path = run.folder / "skipped_files.csv"
        write_atomically(path, skipped_table(skipped))
        print_message(
            f"{len(skipped):,} files of {run.config.data.train} are left out, see {path}: "
            + "; ".join(skipped_summary(skipped))
        )


def described_model(run: PreparedRun) -> dict[str, Any]:
    """Return the metadata of a model file: network, config, cards of the training data."""
    return describe_model(run.config) | {"datasets": read_copied_cards(run.folder / _CARDS_FILE)}


def write_skipped_images(run: PreparedRun, loader: TrainLoader) -> list[str]:
    """Write the list of images that any rank could not read, and return it. Collective."""
    run.state.add_skipped_images(loader.skipped)
    skipped = sorted(run.state.skipped_images)
    if skipped and run.world.is_leader:
        write_atomically(run.folder / _SKIPPED_FILE, "\n".join(skipped) + "\n")
    return skipped


def write_divergence(run: PreparedRun, error: DivergedError) -> None:
    """Write the last steps of a run that has diverged to diverged.json. For the leader only."""
    with suppress(OSError):  # a full disk must not hide the reason why the run ended
        write_atomically(run.folder / _DIVERGED_FILE, json.dumps(error.report) + "\n")


def write_results(run: PreparedRun, skipped: list[str]) -> None:
    """Write the model file and the plot, and print the summary. Collective."""
    weights = averaged_state(run.state.backbone)
    average = run.state.average.state() if run.state.average else None
    if not run.world.is_leader:
        return
    states = {MODEL_FILE: weights} | ({} if average is None else {AVERAGE_FILE: weights | average})
    metadata = described_model(run) | {STEP_KEY: run.state.step}
    for name, state in states.items():
        path = run.folder / name
        save_model(path, merge_adapters(state, str(path)), metadata)
    plot_curves(run.folder / "metrics.jsonl", run.folder / "curves.png")
    summary = summarize(
        run.folder,
        run.config.eval.targets,
        run.config.eval_dir,
        ended_by="train.max_steps"
        if run.schedule.total_steps < run.schedule.steps_of_all_epochs
        else "train.epochs",
        skipped=skipped,
        seconds=time.perf_counter() - run.started_at,
    )
    try:
        print("\n".join(map(printable, summary.splitlines())), flush=True)
    except (OSError, RunError) as error:  # the run has ended well, even if nobody reads that
        warn(f"the summary is not printed: {error_reason(error)}")
