"""Comparison of the schedule of a resumed run with the one of its checkpoint."""

from __future__ import annotations

from facetrain.checkpoint.load import Checkpoint
from facetrain.config.schema import Config
from facetrain.errors import ConfigError
from facetrain.run.folder.compatibility import saved_config
from facetrain.run.parts.step_schedule import StepSchedule, schedule_steps

IMAGES_PER_EPOCH = "images_per_epoch"
"""Key of a checkpoint: the images of an epoch of its data, with the weights of a mixture."""


def describe_batch_change(
    checkpoint: Checkpoint, config: Config, schedule: StepSchedule, num_images: int, world_size: int
) -> list[str]:
    """Return what other data, and what another batch, mean for the schedule; no line if the epoch is the same.

    The config can be the same: `train.batch_size` counts the images of one rank. `num_images` are those of an epoch.
    """
    saved, ranks, step = saved_config(checkpoint), checkpoint.manifest.world_size, checkpoint.step
    if saved is None:
        return []
    images = checkpoint.meta.get(IMAGES_PER_EPOCH)
    if not isinstance(images, int):
        images = num_images
    try:
        before, on_new_data = (schedule_steps(saved, count, ranks) for count in (images, num_images))
    except ConfigError:  # it has another number of images than the run had
        return []
    if _text(before, step) == _text(schedule, step):  # nothing has changed, or the changes undo each other
        return []
    batch = before.global_batch_size
    if saved.train.stages or config.train.stages:
        what = "the global batch of a stage was another one"
        remedy = "restore train.stages and the batch sizes" + (
            f", on {ranks} ranks" if ranks != world_size else ""
        )
    else:
        what = f"the global batch was {batch:,} images and is {schedule.global_batch_size:,} now"
        if options := _options_for_batch(batch, config, schedule.local_batch_size, world_size):
            remedy = f"resume it with {options}"
        else:
            remedy = f"resume it on a number of ranks that divides {batch:,}, which {world_size} does not"
    other_data = f"an epoch had {images:,} images and has {num_images:,} now"
    changes = [(other_data, before, on_new_data, "restore the data"), (what, on_new_data, schedule, remedy)]
    return [
        f"{what}: the schedule counts {_text(new, step)} epochs until step {step:,}, and not {_text(old, step)}; "
        f"to continue where the run was, {remedy}"
        for what, old, new, remedy in changes
        if _text(old, step) != _text(new, step)
    ]


def _text(schedule: StepSchedule, step: int) -> str:
    """Return the epochs until a step as a line has them: smaller differences are not worth one."""
    return f"{schedule.epochs(step):.4g}"


def _options_for_batch(batch: int, config: Config, local: int, world_size: int) -> str:
    """Return the options that give a global batch with as many micro-batches as it needs; "" if there are none.

    Not `train.global_batch_size`, if the config has none: it would turn on synchronized batch norm.
    """
    if config.train.global_batch_size is not None:
        return f"--set train.global_batch_size={batch}"
    images, rest = divmod(batch, world_size)
    divisors = (count for count in range(1, images // 2 + 1) if images % count == 0)
    accumulate = next((count for count in divisors if images // count <= local), 0)
    if rest or not accumulate:
        return ""
    options = []
    if accumulate != config.optim.accumulate:
        options.append(f"--set optim.accumulate={accumulate}")
    if images // accumulate != local:
        options.append(f"--set train.batch_size={images // accumulate}")
    return " ".join(options)
