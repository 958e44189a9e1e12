"""Checkpoint from which a run continues, among those of its folder and of its mirror. For the leader only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from facetrain.checkpoint.commit import CHECKPOINTS, complete_steps, step_folder
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.manifest import read_manifest
from facetrain.checkpoint.mirror import Mirror
from facetrain.checkpoint.run_id import read_run_id
from facetrain.errors import DamagedCheckpointError, NoCheckpointError
from facetrain.remote.address import public
from facetrain.run.folder.earlier import has_had_checkpoint
from facetrain.run.folder.hosts import Hosts, whole_steps
from facetrain.telemetry.log import warn


@dataclass(frozen=True)
class StartingPoint:
    """Checkpoint to continue from. Only its manifest is read; its files may still be in the mirror."""

    checkpoint: Checkpoint
    is_fetched: bool = False
    """Whether the leader's disk lacks it, or has it damaged."""
    left_steps: tuple[int, ...] = ()
    """Steps on this disk of a course that the run has left on another one."""


def find_starting_point(
    folder: Path, mirror: Mirror | None, hosts: Hosts, *, step: int | None, may_be_new: bool
) -> StartingPoint | None:
    """Find the checkpoint of a step, by default the newest of folder and mirror; nothing is written.

    One that is visibly damaged in the folder is fetched again if the mirror has it, with a warning. Where the mirror
    has another course of the run, the checkpoints of the folder after their common one do not count.

    With `may_be_new`, a run without a checkpoint begins: None is returned.

    Raises:
        UsageError: the mirror has another run.
        CheckpointError: there is no such checkpoint, or it cannot be read.
    """
    if mirror is None:
        if may_be_new and not has_had_checkpoint(folder):
            return None
        return StartingPoint(Checkpoint.open(folder, step))
    # The identity first: nothing of another run may ever get into the folder.
    if known := read_run_id(folder):
        mirror.check_run(known)
    stored, whole = mirror.steps(), whole_steps(hosts, folder)
    left = _left_steps(folder, mirror, stored, whole)
    local = [each for each in whole if each not in left]
    if may_be_new and not (stored or local):
        return None
    chosen = step if step is not None else max([*stored, *local], default=None)
    if chosen is None or chosen not in {*stored, *local}:
        missing = "no checkpoint" if chosen is None else f"no checkpoint of step {chosen}"
        remark = f"; the run has left the one in {folder} on another disk" if chosen in left else ""
        raise NoCheckpointError(f"{public(mirror.url)}: {missing}{remark}")
    place = step_folder(folder / CHECKPOINTS, chosen)
    if chosen in local and not (chosen in stored and _is_damaged(place)):
        return StartingPoint(Checkpoint.open(folder, chosen), left_steps=left)
    return StartingPoint(Checkpoint(place, mirror.manifest(chosen)), is_fetched=True, left_steps=left)


def is_behind(folder: Path, mirror: Mirror) -> bool:
    """Return whether the run has gone on elsewhere: the newest checkpoint was never in its folder on this disk.

    Raises:
        UsageError: the mirror has another run.
        CheckpointError: the mirror cannot be read.
    """
    if identity := read_run_id(folder):
        mirror.check_run(identity)
    stored, local = mirror.steps(), complete_steps(folder / CHECKPOINTS)
    known = {*local} - {*_left_steps(folder, mirror, stored, local)}
    return max(stored, default=-1) > max(known, default=-1)


def _left_steps(folder: Path, mirror: Mirror, stored: Sequence[int], local: Sequence[int]) -> tuple[int, ...]:
    """Return the steps in a folder since which the run has gone back on another disk, and on from there."""
    steps, is_left = list[int](), False
    for step in reversed(local):
        try:
            manifest = read_manifest(step_folder(folder / CHECKPOINTS, step))
            # By the files: a step whose verification a signal has interrupted is saved again, with its metrics.
            if step in stored and mirror.manifest(step).files == manifest.files:
                break
        except DamagedCheckpointError:  # it is fetched again, or reported
            break
        is_left = is_left or step in stored or mirror.has_left(manifest)
        steps.append(step)
    return tuple(steps) if is_left else ()


def _is_damaged(place: Path) -> bool:
    """Return whether manifest or sizes of a checkpoint that the mirror has too are wrong on this disk, and warn."""
    try:
        # Not the checksums: to read all files before the ranks read theirs would hold up each start.
        Checkpoint(place).verify_sizes()
    except DamagedCheckpointError as error:
        warn(f"{error}; it is downloaded from the mirror again")
        return True
    return False
