"""Checkpoint folders: atomic commit, listing and removal.

A checkpoints folder holds one folder per checkpoint, and `latest`, a text file with the name of the
newest one. A folder passes through these states. A name that begins with a dot is never loaded:

    .step_00002000.tmp-5f3a90c2    being written
    step_00002000                  complete
    .step_00002000.replaced        the previous checkpoint of this step, while a new one takes its name
    .step_00002000.removed         being removed

A folder reaches and leaves the state "complete" by one rename, which is atomic on POSIX file systems.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path

from facetrain.checkpoint.manifest import Manifest, read_manifest
from facetrain.errors import CheckpointError
from facetrain.files import error_reason, sync_folder, write_atomically
from facetrain.telemetry.log import warn

CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints in a run folder."""
LATEST = "latest"
STEP_NAME = re.compile(r"step_(\d{8,18})")
_REPLACED = ".replaced"
_REMOVED = ".removed"


def step_folder(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step_{step:08d}"


def scratch_folder(folder: Path, step: int) -> Path:
    """Return a new path of the hidden folder in which the checkpoint of a step is written."""
    # A random suffix: a rank of an earlier, failed save may still be writing into the folder of that save.
    return _hidden(step_folder(folder, step), f".tmp-{secrets.token_hex(4)}")


def make_scratch_folder(scratch: Path) -> None:
    """Create the hidden folder in which a checkpoint is written, and the folder of checkpoints if it is missing.

    Raises:
        OSError: a folder cannot be created.
    """
    folder = scratch.parent
    # Without its parents: a run folder that was moved or deleted meanwhile must not appear again.
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)
    scratch.mkdir(exist_ok=True)


def complete_steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, in ascending order.

    The name alone counts, because a folder gets it when it is complete: one whose manifest is missing now is
    damaged, and not absent. So no command silently uses an older one.
    """
    if not folder.is_dir():
        return []
    matches = [STEP_NAME.fullmatch(entry.name) for entry in folder.iterdir()]
    return sorted(int(match[1]) for match in matches if match)


def remove_unfinished(folder: Path) -> None:
    """Remove the hidden folders that an interrupted save or removal left, and restore a replaced checkpoint.

    Call this only while no process writes checkpoints into the folder.
    """
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if not entry.name.startswith(".step_"):
            continue
        target = folder / entry.name.removeprefix(".").removesuffix(_REPLACED)
        if entry.name.endswith(_REPLACED) and not target.exists():
            # The process ended between the two renames of `publish`.
            os.rename(entry, target)
        else:
            remove(entry)


def publish(scratch: Path, target: Path) -> None:
    """Rename a written folder to its final name, and make `latest` name it.

    An existing checkpoint of the same step is kept under a hidden name; `remove_replaced` removes it.

    Raises:
        OSError: a rename failed, and an existing checkpoint keeps its name; or the folder cannot be synced.
    """
    # The names in the folder must be on the disk before the folder counts as complete: after a power cut, a renamed
    # folder could otherwise lack some of its files.
    sync_folder(scratch)
    replaced, exists = _hidden(target, _REPLACED), os.path.lexists(target)
    if exists:
        # A run that resumed from an earlier step saves this step again. Removing the old checkpoint
        # first would leave none if the process ended here.
        os.rename(target, replaced)
    # The commit: before this rename the checkpoint does not exist, after it all of it does.
    try:
        os.rename(scratch, target)
    except OSError:
        if exists:
            os.rename(replaced, target)
        raise
    sync_folder(target.parent)  # from here on, a power cut cannot undo the commit
    # For people and other programs only: facetrain finds the newest checkpoint by the names of the folders.
    try:
        _write_latest(target)
    except OSError as error:  # the checkpoint is complete, and found without the file
        warn(f"{target.parent / LATEST}: {error_reason(error)}; it was not updated to {target.name}")


def remove_replaced(target: Path) -> None:
    """Remove the previous checkpoint that `publish` replaced."""
    remove(_hidden(target, _REPLACED))


def point_latest(folder: Path) -> None:
    """Make `latest` name the newest complete checkpoint, after others were renamed or removed.

    Raises:
        OSError: the file cannot be written.
    """
    steps = complete_steps(folder)
    if steps:
        _write_latest(step_folder(folder, steps[-1]))


def put_aside(path: Path) -> Path:
    """Rename a checkpoint or a file to `left_…`, so that it is kept but no longer counts; return its new path.

    Raises:
        OSError: it cannot be renamed.
    """
    target, number = path.with_name(f"left_{path.name}"), 2
    while os.path.lexists(target):
        target = path.with_name(f"left_{path.stem}_{number}{path.suffix}")
        number += 1
    return path.rename(target)


def remove_surplus(
    folder: Path, *, keep: int, best_metric: str | None, spared: Set[int] = frozenset()
) -> None:
    """Remove all checkpoints except the newest `keep` (1 or more), the best one by a metric, and the `spared` steps.

    With a metric, one whose manifest cannot be read stays too.

    Raises:
        OSError: a checkpoint cannot be renamed; the others are removed.
    """
    steps = complete_steps(folder)
    # By the number of the step and not by time: clocks of hosts differ, and copied folders have new times.
    kept: set[int | None] = {*steps[-keep:], *spared}
    if best_metric:
        manifests = _manifests(folder, steps)
        # A file server that fails once must not cost the best one.
        kept |= {best_step(manifests, best_metric), *(set(steps) - manifests.keys())}
    failure: OSError | None = None
    for step in steps:
        if step not in kept:
            try:
                _remove_checkpoint(step_folder(folder, step))
            except OSError as error:
                failure = failure or error
    if failure:
        raise failure


def best_step(manifests: Mapping[int, Manifest], metric: str) -> int | None:
    """Return the step with the largest finite value of a metric, or None if no checkpoint has one."""
    ranks: dict[int, tuple[float, int, int]] = {}
    for step, manifest in manifests.items():
        value, verified_step = manifest.metrics.get(metric, math.nan), manifest.meta.get("verified_step")
        if math.isfinite(value):
            # Of equal values the newest verification wins: it is of the network that was trained longer. Of the
            # checkpoints since a verification the first wins: it has the weights that were verified, or the nearest.
            ranks[step] = value, verified_step if isinstance(verified_step, int) else step, -step
    return max(ranks, key=ranks.__getitem__, default=None)


def _manifests(folder: Path, steps: list[int]) -> dict[int, Manifest]:
    """Return the manifests that can be read."""
    manifests = {}
    for step in steps:
        with suppress(CheckpointError):
            manifests[step] = read_manifest(step_folder(folder, step))
    return manifests


def _remove_checkpoint(target: Path) -> None:
    # The rename comes first, so that no reader finds a checkpoint with some of its files missing.
    # An earlier removal may have been interrupted here, and its folder is in the way of the rename.
    removed = _hidden(target, _REMOVED)
    remove(removed)
    os.rename(target, removed)
    # Otherwise a power cut could undo the rename and not the removal of the files.
    sync_folder(target.parent)
    remove(removed)


def remove(path: Path) -> None:
    """Remove a folder, or whatever has taken its name, as far as the operating system permits it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _write_latest(target: Path) -> None:
    write_atomically(target.parent / LATEST, target.name + "\n")


def _hidden(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}{suffix}")
