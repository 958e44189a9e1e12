"""Room and speed for checkpoints."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from facetrain.doctor.check_result import Finding, failure, ok, warning

_PROBE = 1 << 26
_BLOCK = 1 << 22
_GIB = 1 << 30
_SLOW_S = 300


def check_disk(folder: Path, *, checkpoint_bytes: int = 0, kept: int = 0) -> list[Finding]:
    """Write and sync a file of 64 MiB, rename a folder, compare the free space with the checkpoints to come.

    Raises:
        OSError: nothing can be written there.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    # One more than are kept: the next is written before the oldest goes.
    needed = checkpoint_bytes * (kept + 1)
    found = f"{existing}: {free / _GIB:.1f} GiB free"
    if checkpoint_bytes:
        found += f", {kept + 1} checkpoints of {checkpoint_bytes / _GIB:.2f} GiB at most"
    if free < needed + _PROBE:
        return [
            failure("disk space", found, "free some, set run.dir to a larger disk, or lower checkpoint.keep")
        ]
    return [ok("disk space", found), _speed(existing, checkpoint_bytes), _renaming(existing)]


def _speed(folder: Path, checkpoint_bytes: int) -> Finding:
    block = os.urandom(_BLOCK)
    with tempfile.TemporaryFile(dir=folder) as file:
        since = time.perf_counter()
        for _ in range(_PROBE // _BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        rate = _PROBE / (time.perf_counter() - since)
    found = f"{rate / 1e6:,.0f} MB/s written and synced"
    seconds = checkpoint_bytes / rate
    if checkpoint_bytes:
        found += f": a checkpoint takes about {seconds:,.0f} s"
    if seconds > _SLOW_S:
        return warning(
            "disk speed", found, "keep checkpoint.async on and checkpoint.every_steps well above that"
        )
    return ok("disk speed", found)


def _renaming(folder: Path) -> Finding:
    with tempfile.TemporaryDirectory(
        dir=folder, prefix=".facetrain-doctor-", ignore_cleanup_errors=True
    ) as name:
        written, whole = Path(name, "written"), Path(name, "whole")
        written.mkdir()
        (written / "file").write_bytes(b"a")
        try:
            os.rename(written, whole)
        except OSError as error:
            found = f"{folder}: a folder that holds a file cannot be renamed ({error.strerror})"
            return failure(
                "disk renames", found, "set run.dir to a file system that can: so checkpoints appear"
            )
    return ok("disk renames", "a folder gets its name at once")
