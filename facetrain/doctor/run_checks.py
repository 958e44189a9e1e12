"""A run description against what published recipes and the memory of the device allow."""

from __future__ import annotations

from pathlib import Path

from facetrain.checkpoint.commit import LATEST, complete_steps, step_folder
from facetrain.checkpoint.load import Checkpoint
from facetrain.doctor.check_result import Finding, count, failure, ok, warning
from facetrain.errors import CheckpointError
from facetrain.plan.forecast import Forecast
from facetrain.plan.limits import USABLE

# arcface_torch's configs: SGD 0.1 for 8 × 128 images, 0.4 for 4,096, 0.02 for 128; AdamW 0.001 for ViTs.
_SGD_PER_IMAGE = 0.1 / 1024
_FACTOR = 4
_FACTOR_WITH_WARMUP = 10
_ADAMW_HIGHEST = 4e-3


def check_learning_rate(optimizer: str, lr: float, global_batch_size: int, *, warmup: bool) -> list[Finding]:
    """Compare the learning rate with the published ones, which grow with the global batch."""
    found = f"{optimizer}, lr {lr:g} for {global_batch_size:,} images a step"
    if optimizer == "adamw":
        if lr > _ADAMW_HIGHEST:
            return [warning("learning rate", found, "published AdamW recipes use 0.001: lower optim.lr")]
        return [ok("learning rate", found)]
    usual = _SGD_PER_IMAGE * global_batch_size
    if lr > usual * (_FACTOR_WITH_WARMUP if warmup else _FACTOR):
        do = f"published recipes use about {usual:.2g} for this batch: lower optim.lr, or warm up"
        return [warning("learning rate", found, do)]
    if lr < usual / _FACTOR:
        do = f"published recipes use about {usual:.2g} for this batch: raise optim.lr, or train for longer"
        return [warning("learning rate", found, do)]
    return [ok("learning rate", found)]


_GIB = 1 << 30


def checkpoint_bytes(needed: Forecast, world_size: int) -> int:
    """Return the bytes of one checkpoint: each weight with its moments, of the backbone once, of all centers."""
    centers = needed.centers + needed.center_moments + needed.elsewhere
    return needed.weights + needed.moments + centers * world_size


def check_memory(needed: Forecast, memory: int) -> list[Finding]:
    """Compare the bytes that a rank will need at the worst moment of a step with those that its device has."""
    found = f"{needed.total / _GIB:.1f} of {memory / _GIB:.0f} GiB by the forecast"
    if needed.total > memory:
        do = "`facetrain plan` names the cheapest change that makes it fit, and the largest batch"
        return [failure("memory", found, do)]
    if needed.total > USABLE * memory:
        do = "it may fail on what is lost between blocks: `facetrain plan` names the largest batch"
        return [warning("memory", found, do)]
    return [ok("memory", found)]


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
