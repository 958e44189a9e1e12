"""What is examined in a run's folder: after every kill, and at the end against the uninterrupted run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facetrain.checkpoint.commit import complete_steps, step_folder
from facetrain.checkpoint.load import Checkpoint
from facetrain.errors import CheckpointError
from facetrain.telemetry.jsonl import read_jsonl

_CLOCK = {"images_per_s", "left_s", "wait_s", "memory_gib"}
_REPORTED = re.compile(r"^step (\d+)/", re.M)
_SAVED = re.compile(r"rank 0 INFO saved the checkpoint of step (\d+)$", re.M)
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Remains:
    """What a kill has left."""

    reached: int
    """The last step that the run reported."""
    newest: int
    """The step of the newest checkpoint; 0 if there is none yet."""
    bytes_lost: int
    """Of checkpoints that stand under their name or were reported as saved, and cannot be read."""
    was_saving: bool
    """Whether a checkpoint had begun and not ended."""

    @property
    def steps_lost(self) -> int:
        """Steps that are trained again."""
        return max(self.reached - self.newest, 0)


def after_kill(folder: Path, said: str) -> Remains:
    """Verify every checkpoint; `said` is what the run has printed."""
    checkpoints = folder / "checkpoints"
    steps = complete_steps(checkpoints)
    reported = [int(step) for step in _REPORTED.findall(said)]
    lost = sum(_bytes_lost(step_folder(checkpoints, step)) for step in steps)
    newest = steps[-1] if steps else 0
    if newest < max(saved_steps(folder), default=0):
        lost += 1  # of a checkpoint that is gone nobody knows the size
    if steps:
        lost += _bytes_lost(checkpoints / "latest")
    left = list(checkpoints.glob(".step_*.tmp-*"))
    return Remains(max(reported, default=newest), newest, lost, bool(left))


def saved_steps(folder: Path) -> list[int]:
    """Return the steps whose checkpoints were reported as saved, in the order of the reports."""
    log = folder / "log.txt"
    text = log.read_text(errors="replace") if log.exists() else ""
    return [int(step) for step in _SAVED.findall(text)]


def ranks_of(folder: Path) -> int:
    """Return on how many ranks the run was last trained; 0 if it has not begun."""
    environment = folder / "environment.json"
    return int(json.loads(environment.read_text())["world_size"]) if environment.exists() else 0


def differences(folder: Path, whole: Path, *, exact: bool) -> list[str]:
    """Return in what a run that was killed differs from the one that was not."""
    ours, theirs = _recorded(folder), _recorded(whole)
    if exact:
        found = [f"step {a['step']}: {a} and {b}" for a, b in zip(ours, theirs, strict=False) if a != b]
        found += [] if len(ours) == len(theirs) else [f"{len(ours)} records and {len(theirs)}"]
        return found + [f"another {name}" for name in _other_files(folder, whole)]
    losses = [[record["loss"] for record in records if "loss" in record] for records in (ours, theirs)]
    if len(losses[0]) != len(losses[1]):
        return [f"{len(losses[0])} losses and {len(losses[1])}"]
    pairs = zip(*losses, strict=True)
    return [f"loss {a} and {b}" for a, b in pairs if abs(a - b) > _ROUNDING * abs(b)]


def _recorded(folder: Path) -> list[dict[str, Any]]:
    records = read_jsonl(folder / "metrics.jsonl")
    return [
        {name: value for name, value in record.items() if name not in _CLOCK}
        for record in records
        if "save_failed" not in record
    ]


def _other_files(folder: Path, whole: Path) -> list[str]:
    ours, theirs = (
        {entry.name: entry.sha256 for entry in Checkpoint.open(path).manifest.files}
        for path in (folder, whole)
    )
    return [name for name in theirs if name.startswith(("rep", "rows")) and ours.get(name) != theirs[name]]


def _bytes_lost(path: Path) -> int:
    try:
        Checkpoint.open(path).verify()
    except CheckpointError:
        return sum(file.stat().st_size for file in path.rglob("*")) or 1
    return 0
