"""Choice of the batch size that fits into the memory of the machine (`facetrain train --batch auto`)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.data.loading.sampler import epoch_size
from facetrain.distributed import collectives
from facetrain.distributed.world import World
from facetrain.errors import ConfigError
from facetrain.plan.limits import MemoryBudget
from facetrain.plan.memory import GIB
from facetrain.run.choose import rate_values
from facetrain.run.parts.step_schedule import local_batch_size, lr_factor

_MARGIN = 0.9
"""Share of the free memory that the forecast may take, because the forecast has an error too."""
_LARGEST_GLOBAL_BATCH = 8192
"""Images per step up to which a rate in proportion to the batch kept the accuracy: Goyal et al. (arXiv 1706.02677),
section 5.1."""
_LEAST_STEPS = 100
"""Steps that an epoch keeps: with fewer, a larger batch takes more epochs to the same accuracy."""
_MULTIPLE = 8
"""Batch sizes that tensor cores fill are multiples of this number."""


def fit_batch(
    config: Config, world: World, source: FaceDataset, *, keep_lr: bool = False
) -> tuple[dict[str, float], str]:
    """Return the config keys of the batch to use and their values, and a line that says why. Collective.

    On a GPU it is the largest batch that the forecast of `facetrain plan` finds room for. On a CPU, which a larger
    batch makes no faster, it is the batch of the config if that fits, else the largest that does. The learning rate
    changes with the global batch by `optim.batch_scaling`, unless `keep_lr`.

    Raises:
        ConfigError: `train.stages` has batch sizes, or not even two images fit. All ranks raise it.
    """
    if any(stage.batch_size or stage.global_batch_size for stage in config.train.stages):
        raise ConfigError("--batch auto: the stages of train.stages have batch sizes; give --batch a number")
    cuda, micro_batches = world.device.type == "cuda", world.size * config.optim.accumulate
    memory = min(collectives.gather_json(_free_bytes(world)))
    if not cuda and config.train.keep_freed_memory:
        memory //= 2  # such a process holds up to twice what it uses
    before = local_batch_size(config, world.size)
    bound, reason = before, "the batch of the config; a larger one makes a CPU no faster"
    if cuda:
        most = min(_LARGEST_GLOBAL_BATCH, epoch_size(source) // _LEAST_STEPS)
        bound = max(before, _rounded(most // micro_batches))
        reason = (
            f"at most {_LARGEST_GLOBAL_BATCH:,} images per step, and at least {_LEAST_STEPS} steps per epoch"
        )
    budget = MemoryBudget(world.size, int(_MARGIN * memory), cuda=cuda)
    batch = bound
    if not budget.fits(config, source.num_classes, batch=bound):
        batch = _rounded(min(budget.largest_batch(config, source.num_classes), bound))
        reason = f"the largest that fits into {memory / GIB:.1f} GiB"
    if batch < 2:
        raise ConfigError(
            f"--batch auto: not even two images fit into {memory / GIB:.1f} GiB of free memory per process; "
            "`facetrain plan` lists what needs less memory"
        )
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


def _rounded(batch: int) -> int:
    return batch - batch % _MULTIPLE if batch > _MULTIPLE else batch


def _free_bytes(world: World) -> int:
    """Return the free memory of this rank's GPU, or its share of the free memory of the host."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[0]
    return _free_host_bytes() // world.local_size


def _free_host_bytes() -> int:
    """Return the memory that new processes can have: of the host, or of the container (cgroup v2) if that is less."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):  # Linux alone has these files
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # "max": no limit
        used = int((group / "memory.current").read_text())
        free = min(free, int((group / "memory.max").read_text()) - used)
    return free
