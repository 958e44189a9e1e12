"""Checks of the disk: free space, speed and renames for checkpoints."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from facetrain.config.schema import Config
from facetrain.doctor.check_result import CheckResult, failed, passed, warning
from facetrain.files import error_reason
from facetrain.plan.device import GIB
from facetrain.run.start_checks import check_free_space

_PROBE_BYTES = 1 << 26
_BLOCK_BYTES = 1 << 22
_SLOW_SECONDS = 300
"""A checkpoint that takes longer may not be finished when the next one is due."""


def check_disk(
    folder: Path, config: Config | None = None, *, checkpoint_bytes: int = 0, steps: int = 1
) -> list[CheckResult]:
    """Measure free space, write speed (64 MiB, synced) and folder renames at `folder`.

    Args:
        folder: future run folder; its nearest existing parent is measured.
        config: config of the run, if there is one.
        checkpoint_bytes: size of one of its checkpoints.
        steps: steps of the run.

    Raises:
        RunError: the disk cannot hold a checkpoint.
        OSError: the folder cannot be written to.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    message = f"{existing}: {free / GIB:.1f} GiB free"
    problems: list[str] = []
    if config:
        message += f"; a checkpoint takes {checkpoint_bytes / GIB:.2f} GiB"
        problems = [*check_free_space(config, folder, checkpoint_bytes, steps)]
    if free < _PROBE_BYTES:
        return [failed("disk space", message, "free some space, or set run.dir to a larger disk")]
    return [
        *(warning("disk space", problem, "") for problem in problems),
        *([] if problems else [passed("disk space", message)]),
        _check_speed(existing, checkpoint_bytes),
        _check_rename(existing),
    ]


def _check_speed(folder: Path, checkpoint_bytes: int) -> CheckResult:
    # Random bytes: some file systems compress, and would be measured too fast with zeros.
    block = os.urandom(_BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(_PROBE_BYTES // _BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        rate = _PROBE_BYTES / (time.perf_counter() - start)
    message = f"{rate / 1e6:,.0f} MB/s written and synced"
    seconds = checkpoint_bytes / rate
    if checkpoint_bytes:
        message += f": a checkpoint takes about {seconds:,.0f} s"
    if seconds > _SLOW_SECONDS:
        advice = "keep checkpoint.async on, and let checkpoint.every_steps take much longer than that"
        return warning("disk speed", message, advice)
    return passed("disk speed", message)


def _check_rename(folder: Path) -> CheckResult:
    """Rename a folder that holds a file: checkpoints appear by such a rename, and object stores cannot do it."""
    with tempfile.TemporaryDirectory(
        dir=folder, prefix=".facetrain-doctor-", ignore_cleanup_errors=True
    ) as name:
        before, after = Path(name, "before"), Path(name, "after")
        before.mkdir()
        (before / "file").write_bytes(b"a")
        try:
            os.rename(before, after)
        except OSError as error:
            return failed(
                "disk renames",
                f"{folder}: a folder that holds a file cannot be renamed ({error_reason(error)})",
                "checkpoints need such a rename: set run.dir to another file system",
            )
    return passed("disk renames", "folders can be renamed")
