"""Checks of the disk: free space, and renames for checkpoints."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from facetrain.config.schema import Config
from facetrain.doctor.check_result import CheckResult, failed, passed, warned_if
from facetrain.files import error_reason
from facetrain.plan.memory import GIB
from facetrain.run.start_checks import check_free_space

_LEAST_BYTES = 1 << 26
"""Free space without which no run folder fits."""


def check_disk(
    folder: Path, config: Config | None = None, *, checkpoint_bytes: int = 0, steps: int = 1
) -> Iterator[CheckResult]:
    """Measure free space at `folder`, and try to rename a folder there.

    Args:
        folder: future run folder; its nearest existing parent is measured.
        config: config of the run, if there is one.
        checkpoint_bytes: size of one of its checkpoints.
        steps: steps of the run.

    Raises:
        RunError: the disk cannot hold a checkpoint.
        OSError: the folder cannot be written to.
    """
    # The run folder appears at the start of the run.
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    message = f"{existing}: {free / GIB:.1f} GiB free"
    problems = list(check_free_space(config, folder, checkpoint_bytes, steps)) if config else []
    if free < _LEAST_BYTES:
        yield failed("disk space", message, "free some space, or set run.dir to a larger disk")
        return
    if config:
        message += f"; a checkpoint takes {checkpoint_bytes / GIB:.2f} GiB"
    yield warned_if(bool(problems), "disk space", "; ".join(problems) or message, "")
    yield _check_rename(existing)


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
