"""Checks of a run: learning rate, memory and checkpoints."""

from __future__ import annotations

from pathlib import Path

from facetrain.checkpoint.commit import LATEST, complete_steps, step_folder
from facetrain.checkpoint.identity import check_identity
from facetrain.checkpoint.load import Checkpoint
from facetrain.doctor.check_result import LIKELY, POSSIBLE, CheckResult, count_text, failed, passed, warning
from facetrain.errors import CheckpointError, ForeignCheckpointError
from facetrain.optim.settings import OptimSettings
from facetrain.plan.device import GIB
from facetrain.plan.forecast import Forecast
from facetrain.plan.limits import USABLE

# arcface_torch's configs: SGD 0.1 for 8 × 128 images, 0.4 for 4,096, 0.02 for 128; AdamW 0.001 for ViTs.
_SGD_LR_PER_IMAGE = 0.1 / 1024
_POSSIBLE_FACTOR, _LIKELY_FACTOR = 3.0, 6.0
"""Factors between the rate and the published one for the batch. Published configs are within a factor of 2."""
_HIGHEST_ADAMW_LR = 4e-3


def check_learning_rate(
    optim: OptimSettings, global_batch_size: int, *, has_initial_weights: bool = False
) -> list[CheckResult]:
    """Compare the learning rate with the published ones, which for SGD are proportional to the global batch.

    Args:
        optim: optimizer and learning rate of the config.
        global_batch_size: images per step of all ranks and micro-batches.
        has_initial_weights: the run starts from trained weights, for which lower rates are usual.
    """
    lr = optim.lr
    message = f"{optim.name}, lr {lr:g} with {global_batch_size:,} images per step"
    if optim.name == "adamw":
        if lr > _HIGHEST_ADAMW_LR:
            advice = "published AdamW recipes use 0.001: lower optim.lr"
            return [warning("learning rate", message, advice, LIKELY)]
        return [passed("learning rate", message)]
    published = _SGD_LR_PER_IMAGE * global_batch_size
    factor = max(lr / published, published / lr)
    if factor < _POSSIBLE_FACTOR or (lr < published and has_initial_weights):
        return [passed("learning rate", message)]
    message += f"; published recipes use {lr:g} with about {lr / _SGD_LR_PER_IMAGE:,.0f}"
    change = "lower optim.lr" if lr > published else "raise optim.lr"
    advice = (
        f"they use about {published:.2g} with this batch: {change}, or change the batch "
        "(train.batch_size × ranks × optim.accumulate)"
    )
    certainty = LIKELY if factor >= _LIKELY_FACTOR else POSSIBLE
    return [warning("learning rate", message, advice, certainty)]


def checkpoint_bytes(needed: Forecast, world_size: int) -> int:
    """Return the size of one checkpoint: the backbone and its average once, all class centers and their moments."""
    centers = needed.centers + needed.center_moments + needed.elsewhere
    return needed.weights + needed.moments + needed.average + centers * world_size


def check_memory(needed: Forecast, memory: int) -> list[CheckResult]:
    """Compare the forecast of a rank's peak of memory with the memory of its device, in bytes."""
    message = f"forecast: {needed.total / GIB:.1f} of {memory / GIB:.0f} GiB"
    if needed.total > memory:
        advice = "`facetrain plan` prints the cheapest change that makes it fit, and the largest batch"
        return [failed("memory", message, advice)]
    if needed.total > USABLE * memory:
        advice = "memory lost between blocks may make it fail: `facetrain plan` prints the largest batch"
        return [warning("memory", message, advice)]
    return [passed("memory", message)]


def check_checkpoints(run_dir: Path) -> list[CheckResult]:
    """Verify every checkpoint of a run, and check that `latest` names the newest."""
    folder = run_dir / "checkpoints"
    steps = complete_steps(folder)
    if not steps:
        advice = "nothing to do if the run has just started"
        return [warning("checkpoints", f"{folder}: there is no checkpoint yet", advice)]
    results = [_verify_checkpoint(step_folder(folder, step)) for step in steps]
    return [*results, *_check_latest(folder, steps[-1]), *_check_unfinished(folder)]


def _verify_checkpoint(folder: Path) -> CheckResult:
    try:
        checkpoint = Checkpoint(folder)
        check_identity(folder, checkpoint.manifest)
        checkpoint.verify()
    except ForeignCheckpointError as error:
        return failed("checkpoint", str(error), "no run resumes from it without --accept-foreign")
    except (CheckpointError, OSError) as error:
        return failed("checkpoint", str(error), "remove this checkpoint: no run can resume from it")
    manifest = checkpoint.manifest
    size = sum(entry.size for entry in manifest.files) / GIB
    ranks = count_text(manifest.world_size, "rank")
    message = f"{folder.name}: {len(manifest.files)} files, {size:.2f} GiB, saved on {ranks}"
    return passed("checkpoint", f"{message}; all checksums match")


def _check_latest(folder: Path, newest: int) -> list[CheckResult]:
    path = folder / LATEST
    name = step_folder(folder, newest).name
    named = path.read_text(errors="replace")[:64].strip() if path.is_file() else "nothing"
    if named != name:
        advice = "facetrain does not read this file; correct it if another program does"
        return [warning("latest", f"{path} names {named}, the newest checkpoint is {name}", advice)]
    return [passed("latest", f"names {name}")]


def _check_unfinished(folder: Path) -> list[CheckResult]:
    unfinished = sorted(entry.name for entry in folder.iterdir() if entry.name.startswith(".step_"))
    if not unfinished:
        return []
    advice = "nothing to do: a run is saving now, or was interrupted, and its next start removes these"
    return [warning("unfinished", f"{folder}: {', '.join(unfinished)}", advice)]
