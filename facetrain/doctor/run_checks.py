"""Checks of a run: learning rate, memory and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from facetrain.checkpoint.commit import complete_steps, step_folder
from facetrain.checkpoint.identity import check_identity
from facetrain.checkpoint.load import Checkpoint
from facetrain.doctor.check_result import CheckResult, count_text, failed, passed, warned_if, warning
from facetrain.errors import CheckpointError, ForeignCheckpointError
from facetrain.optim.settings import OptimSettings
from facetrain.plan.forecast import Forecast
from facetrain.plan.limits import USABLE
from facetrain.plan.memory import GIB

# arcface_torch's configs: SGD 0.1 for 8 × 128 images, 0.4 for 4,096, 0.02 for 128; AdamW 0.001 for ViTs.
_SGD_LR_PER_IMAGE = 0.1 / 1024
_POSSIBLE_FACTOR, _LIKELY_FACTOR = 3.0, 6.0
"""Factors between the rate and the published one for the batch. Published configs are within a factor of 2."""
_HIGHEST_ADAMW_LR = 4e-3


def check_learning_rate(
    optim: OptimSettings, global_batch_size: int, *, has_initial_weights: bool = False
) -> CheckResult:
    """Compare the learning rate with the published ones, which for SGD are proportional to the global batch.

    Args:
        optim: optimizer and learning rate of the config.
        global_batch_size: images per step of all ranks and micro-batches.
        has_initial_weights: the run starts from trained weights, for which lower rates are usual.
    """
    check, lr = "learning rate", optim.lr
    message = f"{optim.name}, lr {lr:g} with {global_batch_size:,} images per step"
    if optim.name == "adamw":
        advice = "published AdamW recipes use 0.001: lower optim.lr"
        return warned_if(lr > _HIGHEST_ADAMW_LR, check, message, advice, "likely")
    # Linear in the batch (Goyal et al., arXiv 1706.02677), as the published configs are.
    published = _SGD_LR_PER_IMAGE * global_batch_size
    factor = max(lr / published, published / lr)
    if factor < _POSSIBLE_FACTOR or (lr < published and has_initial_weights):
        return passed(check, message)
    advice = (
        f"they use about {published:.2g} with this batch: {'lower' if lr > published else 'raise'} optim.lr, or change "
        "the batch (train.batch_size × ranks × optim.accumulate)"
    )
    message += f"; published recipes use {lr:g} with about {lr / _SGD_LR_PER_IMAGE:,.0f}"
    return warning(check, message, advice, "likely" if factor >= _LIKELY_FACTOR else "possible")


def checkpoint_bytes(needed: Forecast, world_size: int) -> int:
    """Return the size of one checkpoint: the backbone once, all class centers and their moments."""
    # Each rank saves its shard; all else is saved once.
    centers = needed.centers + needed.center_moments + needed.elsewhere
    return needed.weights + needed.moments + centers * world_size


def check_memory(needed: Forecast, memory: int) -> CheckResult:
    """Compare the forecast of a rank's peak of memory with the memory of its device, in bytes."""
    message = f"forecast: {needed.total / GIB:.1f} of {memory / GIB:.0f} GiB"
    if needed.total > memory:
        advice = "`facetrain plan` prints the largest batch that fits, and what needs less memory"
        return failed("memory", message, advice)
    advice = "memory lost between blocks may make it fail: `facetrain plan` prints the largest batch"
    return warned_if(needed.total > USABLE * memory, "memory", message, advice)


def check_checkpoints(run_dir: Path) -> Iterator[CheckResult]:
    """Verify every checkpoint of a run."""
    folder = run_dir / "checkpoints"
    steps = complete_steps(folder)
    if not steps:
        advice = "nothing to do if the run has just started"
        yield warning("checkpoints", f"{folder}: there is no checkpoint yet", advice)
        return
    for step in steps:
        yield _verify_checkpoint(step_folder(folder, step))
    if unfinished := sorted(entry.name for entry in folder.glob(".step_*")):
        advice = "nothing to do: a run is saving now, or was interrupted, and its next start removes these"
        yield warning("unfinished", f"{folder}: {', '.join(unfinished)}", advice)


def _verify_checkpoint(folder: Path) -> CheckResult:
    try:
        checkpoint = Checkpoint(folder)
        check_identity(folder, checkpoint.manifest)
        checkpoint.verify()
    except ForeignCheckpointError as error:
        return failed("checkpoint", str(error), "move this checkpoint: no run resumes from it")
    except (CheckpointError, OSError) as error:
        return failed("checkpoint", str(error), "remove this checkpoint: no run can resume from it")
    manifest = checkpoint.manifest
    size = sum(entry.size for entry in manifest.files) / GIB
    ranks = count_text(manifest.world_size, "rank")
    message = f"{folder.name}: {len(manifest.files)} files, {size:.2f} GiB, saved on {ranks}"
    return passed("checkpoint", f"{message}; all checksums match")
