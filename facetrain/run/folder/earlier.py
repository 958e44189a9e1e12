"""Checkpoints and files that earlier processes have left in a run folder."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

from facetrain.checkpoint.commit import (
    CHECKPOINTS,
    LATEST,
    STEP_NAME,
    complete_steps,
    point_latest,
    put_aside,
    remove,
    remove_unfinished,
    step_folder,
)
from facetrain.errors import RunError
from facetrain.files import os_errors_as, read_regular_text
from facetrain.models.model_file import MODEL_FILE, read_step
from facetrain.run.folder.hosts import is_whole
from facetrain.run.folder.run_files import PROFILE_FOLDER

HEAD_ROWS, TEACHER_ROWS = "centers", "teacher_centers"
"""Folders in a run folder for the row files of the trained head, and of the class centers of a teacher."""

_LEFTOVER = re.compile(
    r"\.("
    r".+\.[0-9a-f]{16}\.tmp.*"  # files.scratch_path
    r"|tmp[A-Za-z0-9]{6}"  # the library of safetensors
    r"|run\.lock\.[0-9a-f]{16}\.claim"  # RunLock
    r")"
)
RENAME_CHECK = ".facetrain-"
"""Beginning of the name of the folder in which a start checks that the disk can rename folders."""
_LOST = re.compile(rf"lost_{STEP_NAME.pattern}")
_LOCK_AGE_S = 60.0
"""Age at which a temporary file of the lock is a leftover: a younger one may belong to a process that waits."""


def clean_up(folder: Path) -> None:
    """Complete or remove what a killed process has left, before a checkpoint is opened. Only with the lock.

    Raises:
        RunError: the folder cannot be written to.
    """
    with os_errors_as(RunError, folder):
        remove_unfinished(folder / CHECKPOINTS)
        remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files and folders of killed processes from a run folder.

    Only with the lock of the folder, which covers all other files.

    Raises:
        OSError: a folder cannot be read, or a file not be removed.
    """
    for probe in folder.glob(f"{RENAME_CHECK}*"):
        remove(probe)
    for place in (folder, folder / CHECKPOINTS, folder / PROFILE_FOLDER):
        for path in place.iterdir() if place.is_dir() else ():
            if not _LEFTOVER.fullmatch(path.name) or path.is_dir():
                continue
            with suppress(FileNotFoundError):  # another process that wants the lock has removed its own file
                is_old = time.time() - path.lstat().st_mtime > _LOCK_AGE_S
                if is_old or not path.name.startswith(".run.lock."):
                    path.unlink()
    # A process removes its row files as soon as it has opened them: only a kill before that leaves one.
    for name in (HEAD_ROWS, TEACHER_ROWS):
        _remove_row_files(folder / name)


def _remove_row_files(place: Path) -> None:
    """Remove the row files of all ranks from a folder, and no others: a user may have named a folder so."""
    if place.is_symlink():  # it leads out of the run folder
        return
    for path in place.glob("rank_*/**/rows.bin"):
        with suppress(OSError):
            path.unlink()
    for path in [*sorted(place.glob("rank_*/**/"), reverse=True), place]:
        with suppress(OSError):  # it has other files, or is absent
            path.rmdir()


def has_had_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a checkpoint, or has had one: `latest` names it even if it is missing."""
    return (folder / CHECKPOINTS / LATEST).exists() or bool(complete_steps(folder / CHECKPOINTS))


def leave_after(folder: Path, step: int, *, keep_parts: int | None = None) -> list[str]:
    """Rename checkpoints and model file after a step to `left_…`, when a run resumes from it; return the names kept.

    They belong to a course of training that the run leaves. They are kept, but no longer count as its own. With
    `keep_parts`, the run does not leave it but trains these steps again, because a host with a part of each checkpoint
    is lost: a checkpoint that this disk has in part is renamed to `lost_…`. Of all that were, the newest `keep_parts`
    stay, as long as the run has not come to their steps again; they are named if one was renamed now.
    """
    lost = [] if keep_parts is None else _lose_parts_after(folder / CHECKPOINTS, step, keep_parts)
    checkpoints, model = folder / CHECKPOINTS, folder / MODEL_FILE
    later = [step_folder(checkpoints, each) for each in complete_steps(checkpoints) if each > step]
    if (of_model := read_step(model)) is not None and of_model > step:
        # First: beside older checkpoints, it would count as the result of the run.
        later.insert(0, model)
    names = [put_aside(path).name for path in later]
    # After the renames: if the process ends here, `latest` names a missing checkpoint, and the next resume says so.
    point_latest(checkpoints)
    return [*names, *lost]


def _lose_parts_after(checkpoints: Path, step: int, keep: int) -> list[str]:
    later = [step_folder(checkpoints, each) for each in complete_steps(checkpoints) if each > step]
    parts = [path for path in later if not is_whole(path)]
    for part in parts:
        target = part.with_name(f"lost_{part.name}")
        remove(target)  # of an earlier restart
        part.rename(target)
    lost = {int(name[1]): path for path in checkpoints.glob("lost_*") if (name := _LOST.fullmatch(path.name))}
    kept = sorted(each for each in lost if each > step)[-keep:]
    for each in lost.keys() - kept:
        remove(lost[each])
    return [lost[each].name for each in kept if parts]


def missing_newest(folder: Path) -> str | None:
    """Return the name of the checkpoint that `latest` names, if it is newer than all others and does not exist."""
    checkpoints = folder / CHECKPOINTS
    try:
        named = STEP_NAME.fullmatch(read_regular_text(checkpoints / LATEST).strip())
    except (OSError, ValueError):
        return None
    return named[0] if named and int(named[1]) > max(complete_steps(checkpoints), default=0) else None
