"""Inspection of a run folder: after every kill, and at the end against the undisturbed run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facetrain.checkpoint.commit import complete_steps, step_folder
from facetrain.checkpoint.load import Checkpoint
from facetrain.errors import CheckpointError
from facetrain.telemetry.jsonl import read_jsonl

_CLOCK = {"images_per_s", "left_s", "wait_s", "peak_memory_gib"}
_SAVED = re.compile(r"rank 0 INFO saved the checkpoint of step (\d+)$", re.M)
_ROUNDING = 1e-3


@dataclass(frozen=True)
class StateAfterKill:
    """Progress and checkpoints of a run after a kill."""

    reached: int
    """Last step that the run has recorded."""
    newest: int
    """Step of the newest checkpoint; 0 if there is none yet."""
    bytes_lost: int
    """Size of the checkpoints that have their final name, or were reported as saved, and cannot be read."""
    was_saving: bool
    """Whether a checkpoint had been started, but not committed."""


def inspect_after_kill(run: Path) -> StateAfterKill:
    """Verify every checkpoint of a run."""
    checkpoints = run / "checkpoints"
    steps = complete_steps(checkpoints)
    newest = steps[-1] if steps else 0
    lost = sum(_bytes_lost(step_folder(checkpoints, step)) for step in steps)
    # A kill after the first commit can leave no `latest`, which is only for people and other programs.
    if (checkpoints / "latest").exists():
        lost += _bytes_lost(checkpoints / "latest")
    log = run / "log.txt"
    saved = _SAVED.findall(log.read_text(errors="replace")) if log.exists() else []
    lost += newest < max(map(int, saved), default=0)  # the size of a missing checkpoint is unknown
    reached = max((record["step"] for record in _records(run) if "loss" in record), default=0)
    return StateAfterKill(reached, newest, lost, any(checkpoints.glob(".step_*.tmp-*")))


def differences(run: Path, whole: Path, *, exact: bool) -> list[str]:
    """Return the differences between a run that was killed and the undisturbed run, as sentences.

    With `exact`, metrics and saved weights must be equal bit for bit, otherwise the losses to rounding.
    """
    pairs = [_records(run), _records(whole)]
    if not exact:
        pairs = [[record for record in records if "loss" in record] for records in pairs]
    found = [] if len(pairs[0]) == len(pairs[1]) else [f"{len(pairs[0])} records instead of {len(pairs[1])}"]
    for ours, theirs in zip(*pairs, strict=False):
        is_equal = (
            ours == theirs if exact else abs(ours["loss"] - theirs["loss"]) <= _ROUNDING * theirs["loss"]
        )
        found += [] if is_equal else [f"step {ours['step']}: {ours} instead of {theirs}"]
    if exact:
        saved = saved_weights(run)
        found += [
            f"{name} differs" for name, digest in saved_weights(whole).items() if saved.get(name) != digest
        ]
    return found


def saved_weights(run: Path) -> dict[str, str]:
    """Return the names and digests of the files with all weights in a run's newest checkpoint."""
    files = Checkpoint.open(run).manifest.files
    return {file.name: file.sha256 for file in files if file.name.startswith(("rep", "rows"))}


def _records(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [
        {name: value for name, value in record.items() if name not in _CLOCK}
        for record in (read_jsonl(path) if path.exists() else [])
        if "save_failed" not in record
    ]


def _bytes_lost(path: Path) -> int:
    try:
        Checkpoint.open(path).verify()
    except CheckpointError:
        return sum(file.stat().st_size for file in path.rglob("*")) or 1
    return 0
