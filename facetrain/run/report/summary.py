"""Summary of a finished run: loss, accuracy, and the commands to run next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from facetrain.files import shell_path
from facetrain.run.report.list_runs import formatted, read_metrics


def summarize(
    folder: Path,
    targets: Sequence[str],
    eval_dir: str,
    *,
    ended_by: str,
    skipped: list[str],
    has_learned: bool,
    seconds: float,
) -> str:
    """Return the summary of a run as text: first and last loss and accuracy, and the commands to run next.

    `ended_by` is the config key that set the last step. `skipped` lists the images that could not be read. `seconds`
    is the duration of the command. Without `has_learned`, the summary says so.
    """
    records = read_metrics(folder)
    lines = ["", f"{folder}: finished in {seconds:.0f} s"]
    losses = [record for record in records if "loss" in record]
    if losses:
        first, last = losses[0], losses[-1]
        before = f"{formatted(first['loss'], '.3f')} at step {first['step']} → " if len(losses) > 1 else ""
        lines.append(f"  loss      {before}{formatted(last['loss'], '.3f')} at step {last['step']}")
    for name in sorted({name for record in records for name in record if name.endswith("/accuracy")}):
        lines.append(
            _accuracy_line(name.removesuffix("/accuracy"), [record for record in records if name in record])
        )
    if not has_learned:
        lines.append(f"  did not learn in its first steps: see the warning in {folder / 'log.txt'}")
    if skipped:
        lines.append(
            f"  {len(skipped)} images could not be read and were replaced by others; "
            f"{folder / 'skipped_images.txt'} lists them; the first: {skipped[0]}"
        )
    return "\n".join([*lines, *_next_commands(folder, targets, eval_dir, ended_by)])


def _accuracy_line(name: str, records: list[dict[str, Any]]) -> str:
    first, last = records[0], records[-1]
    before, after = first[f"{name}/accuracy"], last[f"{name}/accuracy"]
    line = (
        f"  {name:9} accuracy {formatted(before, '.2%')} at step {first['step']} → {formatted(after, '.2%')}"
    )
    if f"{name}/auc" in last:
        line += f" (AUC {formatted(last[f'{name}/auc'], '.4f')})"
    return f"{line}, {formatted(last[f'{name}/pairs'], '.0f')} pairs"


def _next_commands(folder: Path, targets: Sequence[str], eval_dir: str, ended_by: str) -> list[str]:
    quoted, board = shell_path(folder), folder / "tensorboard"
    lines = ["next:"]
    if targets:
        # A path needs no folder.
        data = "" if Path(targets[0]).is_absolute() else f" --data-dir {shell_path(eval_dir)}"
        lines.append(f"  facetrain eval {quoted} --target {shell_path(targets[0])}{data}")
    lines += [
        f"  facetrain resume {quoted} --set {ended_by}=MORE",
        f"  facetrain report {quoted}",
        f"  facetrain export {quoted} --format onnx --output model.onnx",
    ]
    if board.is_dir():
        lines.append(f"  tensorboard --logdir {shell_path(board)}")
    return lines
