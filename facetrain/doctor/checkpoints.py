"""The checkpoints of a run, compared with their checksums."""

from __future__ import annotations

from pathlib import Path

from facetrain.checkpoint.commit import LATEST, complete_steps, step_folder
from facetrain.checkpoint.load import Checkpoint
from facetrain.doctor.finding import Finding, count, failure, ok, warning
from facetrain.errors import CheckpointError

_GIB = 1 << 30


def check_checkpoints(run_dir: Path) -> list[Finding]:
    """Verify every checkpoint of a run, and that `latest` names the newest."""
    folder = run_dir / "checkpoints"
    steps = complete_steps(folder)
    if not steps:
        return [warning("checkpoints", f"{folder}: there is none yet", "nothing, if the run has just begun")]
    findings = [_verified(step_folder(folder, step)) for step in steps]
    return [*findings, *_latest(folder, steps[-1]), *_unfinished(folder)]


def _verified(folder: Path) -> Finding:
    try:
        checkpoint = Checkpoint(folder)
        checkpoint.verify()
    except (CheckpointError, OSError) as error:
        do = "remove it, so that no one goes on from it"
        return failure("checkpoint", str(error), do)
    manifest = checkpoint.manifest
    size = sum(entry.size for entry in manifest.files) / _GIB
    saved_on = count(manifest.world_size, "rank")
    found = f"{folder.name}: {len(manifest.files)} files, {size:.2f} GiB, of {saved_on}"
    return ok("checkpoint", f"{found}; every checksum is right")


def _latest(folder: Path, newest: int) -> list[Finding]:
    path = folder / LATEST
    name = step_folder(folder, newest).name
    named = path.read_text(errors="replace")[:64].strip() if path.is_file() else "nothing"
    if named != name:
        do = "nothing: facetrain goes by the folders; a program that goes by this file needs it corrected"
        return [warning("latest", f"{path} names {named}, the newest is {name}", do)]
    return [ok("latest", f"names {name}")]


def _unfinished(folder: Path) -> list[Finding]:
    left = sorted(entry.name for entry in folder.iterdir() if entry.name.startswith(".step_"))
    if not left:
        return []
    do = "nothing: the run is saving just now, or was interrupted, and its next start clears this"
    return [warning("unfinished", f"{folder}: {', '.join(left)}", do)]
