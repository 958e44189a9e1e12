"""Whole steps of a run that a config describes: images per second, where the time goes, how near to the limit."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from facetrain.bench.loader import bench_source
from facetrain.bench.machine import Machine, measure_machine, wait_for
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.data.loader import Batch, Loader, LoaderSettings
from facetrain.data.sampler import build_sampler
from facetrain.distributed import collectives
from facetrain.distributed.ddp import wrap_in_ddp
from facetrain.distributed.world import World, join
from facetrain.plan.forecast import backbone_cost, head_shape
from facetrain.run.build import build_augment, build_state, count_workers
from facetrain.run.step_schedule import StepSchedule, schedule_steps
from facetrain.telemetry.memory import peak_gib
from facetrain.train.profile import RECORDED, Profile, profiled
from facetrain.train.state import TrainState
from facetrain.train.step import TrainStep

INPUTS = ("synthetic", "records")
_WARM_UP = 3
_ENDLESS = 1 << 40
_LR = 1e-6
"""So small that noise with random labels cannot make the loss diverge."""

Batches = Iterator[tuple[Batch, ...]]


@dataclass(frozen=True)
class Training:
    """A run that can take steps, without saving, verification or reports."""

    config: Config
    world: World
    schedule: StepSchedule
    state: TrainState
    step: TrainStep

    def take(self, batches: Batches) -> None:
        """Take a step with each."""
        for batch in batches:
            self.step(self.state, batch)
            self.state.step += 1


def measure_training(
    config: Config,
    folder: Path | None,
    *,
    identities: int,
    inputs: Sequence[str],
    steps: int,
    rounds: int,
) -> dict[str, Any] | None:
    """Train on each kind of input in turn, `rounds` times `steps` steps; report on the leader. Collective.

    `synthetic` is one batch that lies on the device; `records` comes from a dataset through the loader: from
    `folder`, or generated. The head has `identities` classes, or those of the dataset where it has more.
    """
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"lr": _LR})})
    with (
        join(config.train.device, timeout_s=config.train.timeout_s) as world,
        tempfile.TemporaryDirectory() as scratch,
        bench_source(folder, size=config.data.image_size) as source,
    ):
        num_classes = max(identities, source.num_classes)
        training = prepare(config, world, num_classes, Path(scratch), source)
        loader = open_loader(training, source)
        feeds = {"synthetic": same_batch(training, num_classes), "records": iter(loader)}
        try:
            machine, rates = _measure(training, {name: feeds[name] for name in inputs}, steps, rounds)
            profiles = {name: _profile(training, feeds[name], Path(scratch)) for name in inputs}
        finally:
            loader.close()
        return _report(training, num_classes, machine, rates, profiles) if world.is_leader else None


def prepare(config: Config, world: World, num_classes: int, scratch: Path, source: FaceDataset) -> Training:
    """Build a run as a config describes it, with so many identities."""
    schedule = schedule_steps(config, _ENDLESS, world.size)
    state = build_state(config, world, num_classes, schedule, scratch, source)
    network = wrap_in_ddp(
        state.network, world, config.train.compress_gradients, accumulate=config.optim.accumulate
    )
    augment = build_augment(config)
    return Training(config, world, schedule, state, TrainStep(network, augment, max_skipped_steps=_ENDLESS))


def same_batch(training: Training, num_classes: int) -> Batches:
    """Yield the same random images and labels again and again."""
    side, count = training.config.data.image_size, training.schedule.local_batch_size
    generator = torch.Generator().manual_seed(training.world.rank)
    image = torch.randint(256, (count, side, side, 3), dtype=torch.uint8, generator=generator)
    label = torch.randint(num_classes, (count,), generator=generator)
    device = training.world.device
    batch = Batch(0, 0, image.to(device), label.to(device), torch.arange(count))
    while True:
        yield (batch,) * training.config.optim.accumulate


def open_loader(training: Training, source: FaceDataset) -> Loader:
    """Read batches of this rank as the run does."""
    config, schedule, world = training.config, training.schedule, training.world
    settings = LoaderSettings(
        local_batch_size=schedule.local_batch_size,
        accumulate=config.optim.accumulate,
        image_size=config.data.image_size,
        workers=count_workers(config, world),
        decode=config.data.decode,
    )
    sampler = build_sampler(
        source, seed=0, global_batch_size=schedule.global_batch_size, mode=config.data.shuffle
    )
    return Loader(source, sampler, settings, rank=world.rank, world_size=world.size, device=world.device)


def _measure(
    training: Training, feeds: dict[str, Batches], steps: int, rounds: int
) -> tuple[Machine, dict[str, list[float]]]:
    """Return what the machine can do at best, and images per second of every round."""
    machine = Machine(0.0, 0.0)
    rates: dict[str, list[float]] = {name: [] for name in feeds}
    for _ in range(rounds):  # in turn: a busy machine hits all alike
        now = measure_machine(training.config.train.precision, training.world.device)
        machine = Machine(max(machine.flops, now.flops), max(machine.bytes, now.bytes))
        for name, batches in feeds.items():
            rates[name].append(rate(training, batches, steps))
    return machine, rates


def rate(training: Training, batches: Batches, steps: int) -> float:
    """Return the images per second of `steps` steps, over all ranks. Collective."""
    training.take(islice(batches, _WARM_UP))
    return rate_of(
        lambda: training.take(islice(batches, steps)),
        steps * training.schedule.global_batch_size,
        training.world.device,
    )


def rate_of(work: Callable[[], object], images: int, device: torch.device) -> float:
    """Return the images per second at which all ranks do some work. Collective."""
    collectives.barrier()
    wait_for(device)
    since = time.perf_counter()
    work()
    wait_for(device)
    return images / (time.perf_counter() - since)


def _profile(training: Training, batches: Batches, scratch: Path) -> Profile:
    found: list[Profile] = []
    trace = scratch / f"rank_{training.world.rank}.pt.trace.json.gz"
    some = islice(batches, _WARM_UP + RECORDED + 1)
    training.take(profiled(some, trace, training.world.device, found.append, warm_up=_WARM_UP))
    return found[0]


def _report(
    training: Training,
    num_classes: int,
    machine: Machine,
    rates: dict[str, list[float]],
    profiles: dict[str, Profile],
) -> dict[str, Any]:
    config, world, batch = training.config, training.world, training.schedule.local_batch_size
    cost = backbone_cost(config, world.size)
    head = head_shape(config, num_classes, world.size, batch, cuda=world.device.type == "cuda")
    # Three products of an embedding with each class of the sample: logits, and two gradients.
    flops = {"backbone": cost.flops_per_image, "head": 6 * head.width * head.sampled * world.size}
    speed = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "torch": torch.__version__,
        "device": next(iter(profiles.values())).device,
        "threads": torch.get_num_threads(),
        "ranks": world.size,
        "backbone": config.model.backbone,
        "precision": config.train.precision,
        "batch": batch,
        "identities": num_classes,
        "matrix_flops": machine.flops,
        "copied_bytes": machine.bytes,
        "flops_per_image": flops,
        "bytes_per_image": cost.moved_per_image,
        "peak_gib": peak_gib(world.device),
        "inputs": {
            name: {
                "images_per_s": value,
                "rounds": rates[name],
                "mfu": value * sum(flops.values()) / machine.flops,
                "share_of_time": profiles[name].shares(),
            }
            for name, value in speed.items()
        },
    }
