"""Identity of a run and of its checkpoints.

A run has a random id. Its folder holds the id in `run_id.txt`, every checkpoint in the field `meta.run_id` of its
manifest.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from facetrain.checkpoint.commit import CHECKPOINTS, step_folder
from facetrain.checkpoint.manifest import MANIFEST, Manifest, is_regular_file
from facetrain.errors import CheckpointError, ForeignCheckpointError
from facetrain.files import os_errors_as

RUN_ID_FILE = "run_id.txt"
_RUN_ID = re.compile(r"[0-9a-f]{16}")


def new_run_id() -> str:
    """Return a random run id: 16 hexadecimal digits."""
    return secrets.token_hex(8)


def read_run_id(run_folder: Path) -> str | None:
    """Return the id of the run in a folder; None if the folder has none.

    Raises:
        CheckpointError: the file does not hold an id.
    """
    path = run_folder / RUN_ID_FILE
    if not os.path.lexists(path):
        return None
    text = ""
    if is_regular_file(path):
        with os_errors_as(CheckpointError, path), path.open(encoding="utf-8", errors="replace") as file:
            # A damaged file may have any size.
            text = file.read(64).strip()
    if not _RUN_ID.fullmatch(text):
        raise CheckpointError(
            f"{path}: does not hold the id of a run (16 hexadecimal digits); restore the file, or remove it to use "
            "the id in the newest checkpoint"
        )
    return text


def run_id_of(manifest: Manifest) -> str | None:
    """Return the id of the run that wrote a checkpoint; None if the checkpoint has none."""
    run_id = manifest.meta.get("run_id")
    return run_id if isinstance(run_id, str) and _RUN_ID.fullmatch(run_id) else None


def check_identity(folder: Path, manifest: Manifest) -> None:
    """Check that a checkpoint below a run folder was written by this run, at the step in its name.

    A run folder without an id accepts the checkpoints of every run, as does a folder that is not part of a run.

    Raises:
        ForeignCheckpointError: the step or the run id differs; the message names the key and both values.
        CheckpointError: as `read_run_id`.
    """
    expected = step_folder(folder.parent, manifest.step).name
    if folder.name != expected:
        raise ForeignCheckpointError(
            f"{folder}: step: {MANIFEST} has {manifest.step}, but the folder is named {folder.name}; it was renamed: "
            f"rename it back to {expected}"
        )
    # A checkpoint that was copied out of its run belongs to none.
    if folder.parent.name != CHECKPOINTS:
        return
    run_folder = folder.parent.parent
    run_id, written_by = read_run_id(run_folder), run_id_of(manifest)
    if run_id is not None and written_by != run_id:
        raise ForeignCheckpointError(
            f"{folder}: run_id: {MANIFEST} has {written_by or 'none'}, but {RUN_ID_FILE} of {run_folder} has {run_id}; "
            "this is the checkpoint of another run: move it out of the folder, or start a run from its weights with "
            "model.init_from"
        )
