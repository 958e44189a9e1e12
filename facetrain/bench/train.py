"""Training benchmark: whole steps of a run, with their share of the machine's peak and where the time goes."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from facetrain.bench.generated_dataset import NUM_IMAGES, open_or_generate
from facetrain.bench.machine_peak import MachinePeak, measure_peak, synchronize
from facetrain.bench.workloads import RunWorkload, Turns, in_turn
from facetrain.config.loading import with_values
from facetrain.config.schema import Config
from facetrain.data.build import open_training_data
from facetrain.data.dataset import FaceDataset
from facetrain.data.loading.loader import Batch
from facetrain.data.loading.staged_loader import StagedLoader
from facetrain.distributed import collectives
from facetrain.distributed.world import World
from facetrain.head.head_group import head_parts
from facetrain.plan.backbone_memory import fake_network
from facetrain.progress import ProgressCallback, ignore_progress
from facetrain.run.build import network_for_steps
from facetrain.run.choose import rate_values
from facetrain.run.parts.learning_check import classes_in_step
from facetrain.run.parts.loader import build_augment, build_loader
from facetrain.run.parts.state import build_state
from facetrain.run.parts.step_schedule import Stage, StepSchedule, schedule_steps
from facetrain.run.parts.world import joined
from facetrain.run.suited_settings import with_suited_precision
from facetrain.telemetry.memory import peak_gib
from facetrain.training.profile import RECORDED_STEPS, Profile, StepProfiler
from facetrain.training.state import TrainState
from facetrain.training.step import TrainStep

_WARM_UP_STEPS = 3
_ENDLESS = 1 << 40
_CALIBRATING_IMAGES = 128
"""Images for the batch norms of a start from another program's graph. Nothing else of a plan reads any."""
_LR = 1e-6
"""Small enough that noise with random labels cannot make the loss diverge."""

Batches = Iterator[tuple[Batch, ...]]
TakeSteps = Callable[[int], None]
"""Takes a number of steps, each with the images of a micro-batch of a run."""


@dataclass(frozen=True)
class BenchedRun:
    """A run that takes steps without checkpoints, verification or logging."""

    config: Config
    state: TrainState
    step: TrainStep
    schedule: StepSchedule

    @property
    def world(self) -> World:
        """Rank, world size and device of this process."""
        return self.state.world

    def take_steps(self, batches: Batches, steps: int) -> None:
        """Take steps, each with the next batch."""
        for batch in islice(batches, steps):
            self.step(self.state, batch)
            self.state.step += 1


def measure_training(
    config: Config,
    workload: RunWorkload,
    turns: Turns,
    others: Mapping[str, Callable[[Config, World, int], TakeSteps]] | None = None,
) -> dict[str, Any] | None:
    """Train on each kind of input in turn; return the report on the leader, None on other ranks. Collective.

    The learning rate of the config is replaced by a very small one. `others` build further programs, by name, from the
    config, the rank and the number of classes; they take turns with the inputs.
    """
    # The head of one stage and the batch of another would be a run that does not exist.
    config = with_values(_benched(config), {"train.stages": ()}, "the benchmark")
    with (
        joined(config) as world,
        tempfile.TemporaryDirectory() as scratch,
        _open_images(config, workload.data) as source,
    ):
        num_classes = workload.num_classes(config, source.num_classes)
        built = {name: build(config, world, num_classes) for name, build in (others or {}).items()}
        run = build_run(config, world, num_classes, Path(scratch), source)
        loader = build_loader(config, world, source, run.schedule, start_step=0)
        with closing(loader):
            inputs = open_inputs(run, num_classes, loader)
            machine = measure_peak(config.train.precision, world.device)
            speed_of = partial(_images_per_second, world.device, turns.steps)
            images = run.schedule.local_batch_size * world.size

            def speed_on(open_input: Callable[[], Batches]) -> float:
                return speed_of(run.schedule.global_batch_size, partial(run.take_steps, open_input()))

            variants = {name: partial(speed_of, images, steps) for name, steps in built.items()} | {
                name: partial(speed_on, open_input) for name, open_input in inputs.items()
            }
            # A benchmark that is stopped, or fails later, has said something.
            report = partial(_print_rate, is_leader=world.is_leader)
            rates = in_turn(variants, turns.rounds, report)
            # The best of two: other work on the machine can only slow a measurement down.
            again = measure_peak(config.train.precision, world.device)
            machine = MachinePeak(max(machine.flops, again.flops), max(machine.bytes, again.bytes))
            profiles = {
                name: _profile(run, open_input(), Path(scratch)) for name, open_input in inputs.items()
            }
        return _report(run, num_classes, machine, rates, profiles) if world.is_leader else None


def measure_steps(
    config: Config, num_classes: int, num_images: int | None, progress: ProgressCallback = ignore_progress
) -> tuple[float, float, str]:
    """Take some steps of each stage on random images in one process.

    The images exist before the steps, so the loader is not measured. Nothing is verified or saved.

    Args:
        config: run description.
        num_classes: classes of the head.
        num_images: images of an epoch; None if not known: the stages then count by their epochs alone.
        progress: counts steps.

    Returns:
        Images per second, as the mean over the run; the largest memory in GiB; cpu or cuda.
    """
    benched = _benched(config)
    with (
        joined(benched) as world,
        tempfile.TemporaryDirectory() as scratch,
        _open_images(benched, None, _CALIBRATING_IMAGES) as source,
    ):
        run = build_run(benched, world, num_classes, Path(scratch), source)
        planned = schedule_steps(config, num_images or _ENDLESS, world.size).stages
        # The run may end before the last ones (`train.max_steps`).
        stages = run.schedule.stages[: len(planned)]
        total = len({stage.describe() for stage in stages}) * (_WARM_UP_STEPS + Turns.steps)
        done, speeds = count(), dict[str, float]()
        for stage in stages:
            if stage.describe() not in speeds:
                speeds[stage.describe()] = _speed_of_stage(
                    run, stage, num_classes, lambda: progress(next(done), total)
                )
        images = [(stage.stop_step - stage.first_step) * stage.global_batch_size for stage in planned]
        seconds = sum(number / speeds[stage.describe()] for number, stage in zip(images, stages, strict=True))
        return sum(images) / seconds, peak_gib(world.device), world.device.type


def _speed_of_stage(run: BenchedRun, stage: Stage, num_classes: int, begin_step: Callable[[], None]) -> float:
    """Return the images per second in some steps of a stage; call `begin_step` before each."""
    batch = {name: getattr(stage, name) for name in ("local_batch_size", "global_batch_size")}
    staged = replace(run, schedule=replace(run.schedule, **batch))
    batches = repeated_batch(staged, num_classes)
    run.state.step = stage.first_step

    def take_steps(steps: int) -> None:
        for _ in range(steps):
            begin_step()
            staged.take_steps(batches, 1)

    return _images_per_second(run.world.device, Turns.steps, stage.global_batch_size, take_steps)


def _benched(config: Config) -> Config:
    """Return the config with a small rate, a number format of this machine, and without an end."""
    values = rate_values(config, _LR) | {"train.max_steps": None}
    return with_suited_precision(with_values(config, values, "the benchmark"))


@contextmanager
def _open_images(config: Config, folder: Path | None, num_images: int = NUM_IMAGES) -> Iterator[FaceDataset]:
    """Open the dataset in a folder, or generated images; for a cache of embeddings, the dataset of the config."""
    if folder is None and config.distill is not None and config.distill.cache is not None:
        yield open_training_data(config.data)
        return
    with open_or_generate(folder, image_size=config.data.image_size, num_images=num_images) as source:
        yield source


def build_run(
    config: Config, world: World, num_classes: int, scratch: Path, source: FaceDataset
) -> BenchedRun:
    """Build network, head and optimizers as `facetrain train` does, with `num_classes` classes."""
    schedule = schedule_steps(config, _ENDLESS, world.size)
    state = build_state(config, world, num_classes, schedule, scratch, source)
    network = network_for_steps(config, state, schedule)
    step = TrainStep(network, build_augment(config), seed=config.seed, max_skipped_steps=_ENDLESS)
    return BenchedRun(config, state, step, schedule)


def open_inputs(run: BenchedRun, num_classes: int, loader: StagedLoader) -> dict[str, Callable[[], Batches]]:
    """Return what opens each kind of input for a measurement: one batch that stays on the device, and a dataset."""
    synthetic, records = repeated_batch(run, num_classes), iter(loader)
    return {
        "synthetic": lambda: synthetic,
        # Without the batches that were read while something else was measured.
        "records": lambda: islice(records, loader.steps_ahead, None),
    }


def repeated_batch(run: BenchedRun, num_classes: int) -> Batches:
    """Yield the same random images and labels again and again."""
    side, count = run.config.data.image_size, run.schedule.local_batch_size
    # Other images on each rank, as in a run.
    generator = torch.Generator().manual_seed(run.world.rank)
    image = torch.randint(256, (count, side, side, 3), dtype=torch.uint8, generator=generator)
    label = torch.randint(num_classes, (count,), generator=generator)
    device = run.world.device
    # With the labels on the host, as from a loader: a head that samples classes would wait for the device.
    numbers = torch.arange(count)
    batch = Batch(0, 0, image.to(device), label.to(device), numbers, label, numbers)
    while True:
        yield (batch,) * run.config.optim.accumulate


def _images_per_second(
    device: torch.device, steps: int, images_per_step: int, take_steps: Callable[[int], None]
) -> float:
    """Return the speed of all ranks together, after some steps that warm up. Collective."""
    # Allocates memory, chooses kernels and fills the queues of the loader.
    take_steps(_WARM_UP_STEPS)
    collectives.barrier()
    synchronize(device)
    start = time.perf_counter()
    take_steps(steps)
    synchronize(device)
    return steps * images_per_step / (time.perf_counter() - start)


def _print_rate(name: str, images_per_s: float, *, is_leader: bool) -> None:
    if is_leader:
        print(f"{name}: {images_per_s:.1f} images/s", file=sys.stderr, flush=True)


def _profile(run: BenchedRun, batches: Batches, scratch: Path) -> Profile:
    profiles: list[Profile] = []
    # The profiler writes a trace, of which only the shares of the parts are used.
    trace = scratch / f"rank_{run.world.rank}.pt.trace.json.gz"
    # One more batch than the profiler records: it stops when the next step begins.
    some = islice(batches, _WARM_UP_STEPS + RECORDED_STEPS + 1)
    with StepProfiler(trace, run.world.device, profiles.append, warm_up=_WARM_UP_STEPS) as profiler:
        for batch in some:
            profiler.begin_step()
            run.take_steps(iter([batch]), 1)
    return profiles[0]


def _report(
    run: BenchedRun,
    num_classes: int,
    machine: MachinePeak,
    rates: dict[str, list[float]],
    profiles: dict[str, Profile],
) -> dict[str, Any]:
    config, world, batch = run.config, run.world, run.schedule.local_batch_size
    # Three products of an embedding with each class of a step: the logits and two gradients. A multiply-add is two.
    classes = sum(
        part.share * classes_in_step(part, batch * world.size) for part in head_parts(run.state.head)
    )
    flops = {"backbone": _backbone_flops(config), "head": round(6 * config.model.embedding_size * classes)}
    # The products with a teacher, and those with the expectations of the classes, are not counted.
    is_counted = config.distill is None and not config.has_expectations
    speed = {name: statistics.median(of_rounds) for name, of_rounds in rates.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, of_rounds in rates.items():
        found[name] = {"images_per_s": speed[name], "rounds": of_rounds}
        if is_counted:
            found[name]["mfu"] = speed[name] * sum(flops.values()) / machine.flops
    report = {
        "torch": torch.version.__version__,
        "device": next(iter(profiles.values())).device,
        "threads": torch.get_num_threads(),
        "ranks": world.size,
        "backbone": config.model.backbone,
        "precision": config.train.precision,
        "batch": batch,
        "identities": num_classes,
        "matrix_flops_per_s": machine.flops,
        "copied_bytes_per_s": machine.bytes,
        "flops_per_image": flops,
        **({"limit_images_per_s": machine.flops / sum(flops.values())} if is_counted else {}),
        "records_over_synthetic": speed["records"] / speed["synthetic"],
        "inputs": {
            name: {**found[name], "share_of_time": profile.shares()} for name, profile in profiles.items()
        },
    }
    # With other programs in this process, its peak is not that of the run.
    others = {name: values for name, values in found.items() if name not in profiles}
    return report | ({"others": others} if others else {"peak_gib": peak_gib(world.device)})


def _backbone_flops(config: Config) -> int:
    """Return the operations of a step for one image, counted on tensors without content."""
    model, side = config.model, config.data.image_size
    # The counter's hooks would keep recomputed activations alive.
    plain = model.model_copy(update={"checkpoint_activations": False})
    with fake_network(plain, side) as net, FlopCounterMode(display=False) as counter:
        net.neck(net.trunk(torch.zeros(2, 3, side, side))).sum().backward()
    return counter.get_total_flops() // 2
