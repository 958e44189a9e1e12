"""Inspection of a run folder: after every kill, and at the end against the uninterrupted run."""

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

_CLOCK = {"images_per_s", "left_s", "wait_s", "peak_memory_gib", "run_id"}
_REPORTED = re.compile(r"^step (\d+)/", re.M)
_SAVED = re.compile(r"rank 0 INFO saved the checkpoint of step (\d+)$", re.M)
_ROUNDING = 1e-3


@dataclass(frozen=True)
class StateAfterKill:
    """Progress and checkpoints of a run after a kill."""

    reached: int
    """Last step that the run has reported."""
    newest: int
    """Step of the newest checkpoint; 0 if there is none yet."""
    bytes_lost: int
    """Size of the checkpoints that have their final name, or were reported as saved, and cannot be read."""
    was_saving: bool
    """Whether a checkpoint had been started, but not committed."""

    @property
    def steps_lost(self) -> int:
        """Number of steps that must be trained again."""
        return max(self.reached - self.newest, 0)


def inspect_after_kill(folder: Path, output: str) -> StateAfterKill:
    """Verify every checkpoint of a run that has printed `output`."""
    checkpoints = folder / "checkpoints"
    steps = complete_steps(checkpoints)
    reported = [int(step) for step in _REPORTED.findall(output)]
    lost = sum(_bytes_lost(step_folder(checkpoints, step)) for step in steps)
    newest = steps[-1] if steps else 0
    if newest < max(saved_steps(folder), default=0):
        lost += 1  # the size of a missing checkpoint is unknown
    if steps:
        lost += _bytes_lost(checkpoints / "latest")
    unfinished = list(checkpoints.glob(".step_*.tmp-*"))
    return StateAfterKill(max(reported, default=newest), newest, lost, bool(unfinished))


def saved_steps(folder: Path) -> list[int]:
    """Return the steps whose checkpoints the log reports as saved, in its order."""
    log = folder / "log.txt"
    text = log.read_text(errors="replace") if log.exists() else ""
    return [int(step) for step in _SAVED.findall(text)]


def ranks_of(folder: Path) -> int:
    """Return the world size of the last start of a run; 0 if it has not started yet."""
    environment = folder / "environment.json"
    return int(json.loads(environment.read_text())["world_size"]) if environment.exists() else 0


def differences(folder: Path, whole: Path, *, exact: bool) -> list[str]:
    """Return the differences between a run that was killed and the uninterrupted run, as sentences.

    With `exact`, metrics and saved weights must be equal bit for bit, otherwise the losses to rounding.
    """
    ours, theirs = _records(folder), _records(whole)
    if exact:
        found = [
            f"step {a['step']}: {a} instead of {b}" for a, b in zip(ours, theirs, strict=False) if a != b
        ]
        found += [] if len(ours) == len(theirs) else [f"{len(ours)} records instead of {len(theirs)}"]
        return found + [f"{name} differs" for name in _differing_files(folder, whole)]
    losses = [[record["loss"] for record in records if "loss" in record] for records in (ours, theirs)]
    if len(losses[0]) != len(losses[1]):
        return [f"{len(losses[0])} losses instead of {len(losses[1])}"]
    pairs = zip(*losses, strict=True)
    return [f"loss {a} instead of {b}" for a, b in pairs if abs(a - b) > _ROUNDING * abs(b)]


def _records(folder: Path) -> list[dict[str, Any]]:
    records = read_jsonl(folder / "metrics.jsonl")
    return [
        {name: value for name, value in record.items() if name not in _CLOCK}
        for record in records
        if "save_failed" not in record
    ]


def _differing_files(folder: Path, whole: Path) -> list[str]:
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
