"""Summary of a run that has ended, as text: its first and last numbers, and the commands to run next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from facetrain import own_parts
from facetrain.config.own_code import allow_option
from facetrain.config.schema import Config
from facetrain.errors import RunError
from facetrain.files import error_reason
from facetrain.remote.address import is_remote
from facetrain.run.folder.run_files import LOG_FILE, REPORT_FILE, SKIPPED_FILE
from facetrain.run.folder.run_state import read_state
from facetrain.run.parts.step_schedule import StepSchedule
from facetrain.run.report.history import History, Metric, formatted, records_of
from facetrain.run.report.published_curve import published_curve_of
from facetrain.telemetry.log import warn
from facetrain.text import count_text, printable, shell_path

_MOST_GROWTH = 1.75
"""Factor from the first to the last loss beyond which a run has not learned, however short it is."""


def more_steps(schedule: StepSchedule, step: int, early_stop: str, *, max_steps: int | None) -> str:
    """Return the options of a resume that trains on, for a run that has ended at a step.

    `early_stop` is the reason of `train.stop_early`, which may also hold at the last step of the schedule. `max_steps`
    is that of the config, which may be the number of steps of all epochs.
    """
    limits = {
        "train.epochs": schedule.steps_of_all_epochs,
        "train.max_steps": max_steps,
    }
    keys = [key for key, last in limits.items() if step >= schedule.total_steps == last]
    if early_stop:
        keys.append("train.stop_early.patience")
    return " ".join(f"--set {key}=MORE" for key in keys)


def print_lines(text: str) -> None:
    """Print the summary of a run that has ended well, even if nothing can take it."""
    try:
        print("\n".join(map(printable, text.splitlines())), flush=True)
    except (OSError, RunError) as error:
        warn(f"the summary is not printed: {error_reason(error)}")


@dataclass(frozen=True)
class Ending:
    """End of a run, for its summary."""

    more: str = "--set train.epochs=MORE"
    """Options of a resume that trains on."""
    is_part: bool = False
    """Whether the run is a part of another command, which says itself what can be done next."""
    early: str = ""
    """Why the run has ended before its last step; empty if it has not."""
    skipped: Sequence[str] = ()
    """Images that could not be read."""
    has_learned: bool = True
    """Whether the check of the first steps has found nothing."""
    seconds: float = 0.0
    """Duration of the command."""


def summarize(folder: Path, config: Config, ending: Ending) -> str:
    """Return the summary of a run as text: first and last loss and accuracy, and the commands to run next."""
    loss, history = config.trained_loss, History.read(folder)
    lines = ["", f"{folder}: finished in {ending.seconds:.0f} s"]
    if loss in history.metrics:
        (start, first), (step, last) = history.metrics[loss].first, history.metrics[loss].last
        before = f"{formatted(first, '.4f')} at step {start} → " if step > start else ""
        lines.append(f"  {loss.replace('_', ' '):9} {before}{formatted(last, '.4f')} at step {step}")
        if ending.has_learned and _has_grown(first, last):
            lines.append(
                "  did not learn: the loss has grown or is not finite; lower optim.lr (`--lr find` finds a rate)"
            )
    lines += [_accuracy_line(name, history.metrics) for name in sorted(history.sets)]
    if published := published_curve_of(folder, read_state(folder).total_steps):
        lines += [f"  {line}" for line in published.describe(records_of(folder))]
    if ending.early:
        lines.append(f"  {ending.early}")
    if not ending.has_learned:
        lines.append(f"  did not learn in its first steps: see the warning in {folder / LOG_FILE}")
    if (folder / REPORT_FILE).is_file():
        lines.append(f"  report    {folder / REPORT_FILE}")
    if ending.skipped:
        replaced = count_text(
            len(ending.skipped), "image could not be read and was", "images could not be read and were"
        )
        lines.append(
            f"  {replaced} replaced by others; {folder / SKIPPED_FILE} lists them; the first: {ending.skipped[0]}"
        )
    if not ending.is_part:
        lines += _next_commands(folder, config, ending.more)
    return "\n".join(lines)


def _has_grown(first: float | str, last: float | str) -> bool:
    """Return whether a loss has grown by more than it varies from step to step. Texts are NaN and infinity."""
    if isinstance(first, str) or isinstance(last, str):
        return isinstance(last, str)
    return last > max(_MOST_GROWTH * first, first + 1)


def _accuracy_line(name: str, metrics: Mapping[str, Metric]) -> str:
    accuracy = metrics[f"{name}/accuracy"]
    (start, before), (_, after) = accuracy.first, accuracy.last
    line = f"  {name:9} accuracy {formatted(before, '%')} at step {start} → {formatted(after, '%')}"
    if f"{name}/auc" in metrics:
        line += f" (AUC {formatted(metrics[f'{name}/auc'].last[1], '.4f')})"
    return f"{line}, {formatted(metrics[f'{name}/pairs'].last[1], '.0f')} pairs"


def _next_commands(folder: Path, config: Config, more: str) -> list[str]:
    quoted, board = shell_path(folder), folder / "tensorboard"
    allowed = own_parts.allow_option(own_parts.is_place(config.model.backbone))
    targets, eval_dir = config.eval.targets, config.eval_dir
    lines = ["next:"]
    if targets:
        # A path needs no folder.
        is_found = is_remote(targets[0]) or Path(targets[0]).is_absolute()
        data = "" if is_found else f" --data-dir {shell_path(eval_dir)}"
        lines.append(f"  facetrain eval {quoted} --target {shell_path(targets[0])}{data}{allowed}")
    lines += [
        f"  facetrain resume {quoted} {more}{allow_option(config)}",
        f"  facetrain export {quoted} --output {shell_path(folder / 'model.onnx')}{allowed}",
    ]
    if board.is_dir():
        lines.append(f"  tensorboard --logdir {shell_path(board)}")
    return lines
