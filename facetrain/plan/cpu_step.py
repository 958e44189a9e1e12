"""Memory of a training process on a CPU, measured: what its allocator holds is more than what the tensors need."""

from __future__ import annotations

from pathlib import Path

import torch

from facetrain.config.schema import Config
from facetrain.data.loading.loader import Batch
from facetrain.distributed.process_setup import keep_freed_memory
from facetrain.distributed.world import World
from facetrain.plan.memory import GIB
from facetrain.run.parts.loader import build_augment
from facetrain.run.parts.state import build_state
from facetrain.run.parts.step_schedule import schedule_steps
from facetrain.telemetry.memory import peak_gib
from facetrain.training.step import TrainStep

STEPS = 8
_ENDLESS = 1 << 40


def measure_process(config: Config, num_classes: int) -> int:
    """Take some steps on random images and verify a batch; return the peak of bytes of this process.

    Raises:
        ConfigError: the config cannot be trained on this machine.
    """
    if config.train.keep_freed_memory:
        keep_freed_memory()  # as the process of a run does
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"lr": 1e-6})})
    world = World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu"))
    schedule = schedule_steps(config, _ENDLESS, 1)
    # Images of the dataset are for merged batch norms to start from, which change no size.
    state = build_state(config, world, num_classes, schedule, Path("unused"), None)  # type: ignore[arg-type]
    step = TrainStep(state.network, build_augment(config), max_skipped_steps=_ENDLESS)
    for _ in range(STEPS):
        step(
            state,
            tuple(
                _batch(config, schedule.local_batch_size, num_classes) for _ in range(config.optim.accumulate)
            ),
        )
        state.step += 1
    if config.eval.targets:
        side = config.data.image_size
        with torch.no_grad():
            state.backbone.eval()(torch.zeros(2 * config.eval.batch_size, 3, side, side))
    return round(peak_gib(world.device) * GIB)


def _batch(config: Config, images: int, num_classes: int) -> Batch:
    side = config.data.image_size
    image = torch.randint(256, (images, side, side, 3), dtype=torch.uint8)
    return Batch(0, 0, image, torch.randint(num_classes, (images,)), torch.arange(images))
