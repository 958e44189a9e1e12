"""Temporary files that killed processes have left in a run folder."""

from __future__ import annotations

import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from facetrain.checkpoint.commit import CHECKPOINTS

HEAD_ROWS, TEACHER_ROWS = "centers", "teacher_centers"
"""Folders in a run folder for the row files of the trained head, and of the class centers of a teacher."""

_LEFTOVER = re.compile(
    r"\.("
    r".+\.[0-9a-f]{16}\.tmp.*"  # files.scratch_path
    r"|.+\.writing"  # files.write_atomically
    r"|tmp[A-Za-z0-9]{6}"  # the library of safetensors
    r"|run\.lock\.[0-9a-f]{16}(\.claim)?"  # LockFile.create, RunLock
    r")"
)
_LOCK_AGE_S = 60.0
"""Age at which a temporary file of the lock is a leftover: a younger one may belong to a process that waits."""


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed processes from a run folder.

    Only with the lock of the folder, which covers all other files.

    Raises:
        OSError: a folder cannot be read, or a file not be removed.
    """
    for place in (folder, folder / CHECKPOINTS, folder / "profile"):
        for path in place.iterdir() if place.is_dir() else ():
            if not _LEFTOVER.fullmatch(path.name) or path.is_dir():
                continue
            with suppress(FileNotFoundError):  # another process that wants the lock has removed its own file
                is_old = time.time() - path.lstat().st_mtime > _LOCK_AGE_S
                if is_old or not path.name.startswith(".run.lock."):
                    path.unlink()
    # A process removes its row files as soon as it has opened them: only a kill before that leaves one.
    for name in (HEAD_ROWS, TEACHER_ROWS):
        shutil.rmtree(folder / name, ignore_errors=True)
