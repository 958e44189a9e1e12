"""Choice of the batch size that fits into the memory of the GPUs (`facetrain train --batch auto`)."""

from __future__ import annotations

import torch

from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.data.loading.sampler import epoch_size
from facetrain.distributed import collectives
from facetrain.distributed.world import World
from facetrain.errors import ConfigError
from facetrain.plan.forecast import forecast, largest_batch
from facetrain.run.choose import rate_values
from facetrain.run.parts.step_schedule import local_batch_size, lr_factor

_LARGEST_GLOBAL_BATCH = 8192
"""Images per step up to which a rate in proportion to the batch kept the accuracy: Goyal et al. (arXiv 1706.02677),
section 5.1."""
_LEAST_STEPS = 100
"""Steps that an epoch keeps: with fewer, a larger batch takes more epochs to the same accuracy."""
_MULTIPLE = 8
"""Batch sizes that tensor cores fill are multiples of this number."""


def fit_batch(
    config: Config, world: World, source: FaceDataset, keep_lr: bool = False
) -> tuple[dict[str, float], str]:
    """Return the config keys of the batch to use and their values, and a line that says why. Collective.

    On a GPU it is the largest batch that the forecast of `facetrain plan` finds room for. On a CPU, which a larger
    batch makes no faster, it is the batch of the config. The learning rate changes with the global batch by
    `optim.batch_scaling`, unless `keep_lr`.

    Raises:
        ConfigError: `train.stages` has batch sizes, or not even two images fit. All ranks raise it.
    """
    if any(stage.batch_size or stage.global_batch_size for stage in config.train.stages):
        raise ConfigError("--batch auto: the stages of train.stages have batch sizes; give --batch a number")
    micro_batches = world.size * config.optim.accumulate
    before = batch = local_batch_size(config, world.size)
    reason = "the batch of the config; a larger one makes a CPU no faster"
    if world.device.type == "cuda":
        batch, reason = _batch_for_gpus(config, world, source)
    key, value = "train.batch_size", batch
    if config.train.global_batch_size:
        key, value = "train.global_batch_size", batch * micro_batches
    line = f"--batch auto: {batch:,} images per process, {batch * micro_batches:,} per step ({reason})"
    values: dict[str, float] = {key: value}
    factor = lr_factor(config, batch / before)
    if not keep_lr and factor != 1:
        values |= rate_values(config, factor * config.optim.lr)
        line += (
            f"; optim.lr {config.optim.lr:g} → {values['optim.lr']:.4g}, because the config has "
            f"{before * micro_batches:,} images per step (optim.batch_scaling)"
        )
    return values, line


def _batch_for_gpus(config: Config, world: World, source: FaceDataset) -> tuple[int, str]:
    """Return the images per rank and micro-batch, and the reason in words."""
    memory, classes = min(collectives.gather_json(_free_bytes(world.device))), source.num_classes
    most = min(_LARGEST_GLOBAL_BATCH, epoch_size(source) // _LEAST_STEPS)
    bound = _rounded(most // (world.size * config.optim.accumulate))
    before = local_batch_size(config, world.size)
    if forecast(config, classes, world.size, batch=max(bound, before)).fits(memory):
        if bound > before:
            return (
                bound,
                f"at most {_LARGEST_GLOBAL_BATCH:,} images per step, at least {_LEAST_STEPS} steps per epoch",
            )
        return before, (
            f"the batch of the config; a larger one has more than {_LARGEST_GLOBAL_BATCH:,} images per step, or leaves "
            f"fewer than {_LEAST_STEPS} steps per epoch"
        )
    batch = _rounded(largest_batch(config, classes, world.size, memory))
    if batch < 2:
        raise ConfigError(
            f"--batch auto: not even two images fit into {memory / 2**30:.1f} GiB of free memory per GPU; "
            "`facetrain plan` lists what needs less memory"
        )
    return batch, f"the largest that fits into {memory / 2**30:.1f} GiB"


def _rounded(batch: int) -> int:
    return batch - batch % _MULTIPLE if batch > _MULTIPLE else batch


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]
