"""The composition root: has every part of a run built from its config, and hands them to the loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from facetrain.checkpoint.load import Checkpoint, open_on_all_ranks
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.config.loading import dump_config
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.data.loader import Batch, Loader, LoaderSettings
from facetrain.data.sampler import build_sampler, epoch_size
from facetrain.distributed import collectives
from facetrain.distributed.agreement import explain_failures, fail_together, only_leader_reports
from facetrain.distributed.ddp import wrap_in_ddp
from facetrain.distributed.stop_request import StopRequest
from facetrain.distributed.world import World, join
from facetrain.errors import CheckpointError, DivergedError, SkippedError
from facetrain.files import write_atomically
from facetrain.models.model_file import save_model
from facetrain.run.build import (
    build_augment,
    build_state,
    check_decode,
    count_workers,
    describe,
)
from facetrain.run.callbacks import RunHooks
from facetrain.run.compatibility import check_compatibility
from facetrain.run.folder import claim_folder, leave_unused, open_folder, opened_before, set_aside_later
from facetrain.run.open_data import is_to_be_drawn, open_data, written_meanwhile
from facetrain.run.step_schedule import StepSchedule, schedule_steps
from facetrain.run.summary import plot_curves, summary
from facetrain.telemetry.console import Console
from facetrain.telemetry.jsonl import JsonLines
from facetrain.telemetry.log import log_to, logger, stop_logging
from facetrain.telemetry.recorder import Recorder, Sink
from facetrain.telemetry.tensorboard import TensorBoard
from facetrain.train.loop import fit
from facetrain.train.profile import RECORDED, WARM_UP, Profile, profiled
from facetrain.train.state import TrainState, averaged_state
from facetrain.train.step import TrainStep
from facetrain.verify.pair_set import PairSet
from facetrain.verify.verifier import Verifier


def train(config: Config, run_dir: Path | None = None, *, profile: bool = False) -> int:
    """Train a new run on this rank; return the exit code. Collective.

    Where an elastic agent has started the workers again, the run goes on from its newest checkpoint.
    `profile` records some steps in the run's folder.
    """
    with _joined(config) as world:
        folder, again = claim_folder(world, given=run_dir, default=Path(config.run.dir) / config.run.name)
        try:
            return _run(config, world, folder, open_on_all_ranks(world, folder) if again else None, profile)
        finally:
            if run_dir is None:
                leave_unused(folder, world)


def resume(config: Config, run_dir: Path, step: int | None = None, *, profile: bool = False) -> int:
    """Go on with a run from a checkpoint, the newest by default; return the exit code. Collective."""
    with _joined(config) as world:
        # Workers that were started again have newer checkpoints than the one first asked for.
        again = opened_before(run_dir, world)
        checkpoint = open_on_all_ranks(world, run_dir, None if again else step)
        return _run(config, world, run_dir, checkpoint, profile)


@contextmanager
def _joined(config: Config) -> Iterator[World]:
    timeout_s = config.train.timeout_s
    joining = join(config.train.device, timeout_s=timeout_s, keep_freed=config.train.keep_freed_memory)
    with joining as world, explain_failures(world, timeout_s):
        yield world


@dataclass(frozen=True)
class _Run:
    """What the parts of a run are built from."""

    config: Config
    world: World
    folder: Path
    source: FaceDataset
    sets: list[PairSet]
    schedule: StepSchedule
    state: TrainState
    since: float
    """When the command began, on the clock of time.perf_counter."""
    profile: bool
    """Whether to record some steps."""


def _run(config: Config, world: World, folder: Path, checkpoint: Checkpoint | None, profile: bool) -> int:
    since = time.perf_counter()
    with fail_together(world):
        check_decode(config, world)
        source, sets = open_data(config, workers=count_workers(config, world))
        schedule = schedule_steps(config, epoch_size(source), world.size)
        if checkpoint is not None:
            check_compatibility(checkpoint, config, schedule)
        state = build_state(config, world, source.num_classes, schedule, folder, source)
        state.head.check_labels(source.labels)
    network = wrap_in_ddp(
        state.network, world, config.train.compress_gradients, accumulate=config.optim.accumulate
    )
    with fail_together(world):
        if checkpoint is not None:
            state.restore(checkpoint)
        if world.is_leader:
            # Only now: where the config does not fit the checkpoint, the folder stays as it was.
            if checkpoint is not None:
                set_aside_later(folder, checkpoint.step)
            open_folder(folder, world, dump_config(config))
    log = log_to(folder / "log.txt", world.rank)
    try:
        run = _Run(config, world, folder, source, sets, schedule, state, since, profile)
        return _train(run, network, resumed=checkpoint is not None)
    finally:
        stop_logging(log)


def _train(run: _Run, network: nn.Module, *, resumed: bool) -> int:
    config, state, schedule = run.config, run.state, run.schedule
    recorder, console = _open_recorder(run, resumed=resumed)
    spikes = _open_spikes(run, resumed=resumed)
    say = console.print if console else logger.info
    if console:
        _announce(console, run)
    workers, started_at = count_workers(config, run.world), state.step
    loader = _build_loader(run, workers)
    augment = build_augment(config)
    step = TrainStep(network, augment, max_skipped_steps=config.train.max_skipped_steps)
    with StopRequest() as stop:
        hooks = _build_hooks(run, recorder, spikes, step, loader, stop, say, workers)
        try:
            hooks.begin(state, resumed=resumed)
            if not hooks.stopping(state):
                fit(state, _batches(run, loader, say), step, hooks)
            due = state.step == schedule.total_steps and state.step % config.checkpoint.every_steps
            if due and state.step > started_at:
                hooks.save_now(state)
            hooks.finish()
            if state.step == schedule.total_steps and state.step > started_at:
                hooks.insist(state)
        except (CheckpointError, DivergedError, SkippedError) as error:
            hooks.finish()  # all ranks are here: the checkpoint in flight is from before
            _list_skipped(run, loader)
            if isinstance(error, DivergedError) and run.world.is_leader:
                with suppress(OSError):  # a full disk must not hide why the run ended
                    write_atomically(run.folder / "diverged.json", json.dumps(error.report) + "\n")
            raise only_leader_reports(run.world, error) from error
        finally:
            loader.close()
            recorder.close()
            spikes.close()
    skipped = _list_skipped(run, loader)
    if hooks.signal:
        say(
            f"stopped at step {state.step}; `facetrain resume {run.folder}` goes on from step {hooks.last_saved}"
        )
        return 128 + hooks.signal
    _conclude(run, skipped)
    return 0


def _list_skipped(run: _Run, loader: Loader) -> list[str]:
    """Write down which images gave way to others on any rank, and return them. Collective."""
    skipped = sorted({message for each in collectives.gather_json(loader.skipped) for message in each})
    if skipped and run.world.is_leader:
        write_atomically(run.folder / "skipped_images.txt", "\n".join(skipped) + "\n")
    return skipped


def _conclude(run: _Run, skipped: list[str]) -> None:
    weights = averaged_state(run.state.backbone)
    if not run.world.is_leader:
        return
    save_model(run.folder / "model.safetensors", weights, describe(run.config))
    plot_curves(run.folder / "metrics.jsonl", run.folder / "curves.png")
    whole_epochs = run.schedule.steps_per_epoch * run.config.train.epochs
    told = summary(
        run.folder,
        run.config.eval.targets,
        run.config.eval_dir,
        ended_by="train.max_steps" if run.schedule.total_steps < whole_epochs else "train.epochs",
        skipped=skipped,
        seconds=time.perf_counter() - run.since,
    )
    print(told)


def _build_loader(run: _Run, workers: int) -> Loader:
    config, schedule = run.config, run.schedule
    order = build_sampler(
        run.source, seed=config.seed, global_batch_size=schedule.global_batch_size, mode=config.data.shuffle
    )
    settings = LoaderSettings(
        local_batch_size=schedule.local_batch_size,
        accumulate=config.optim.accumulate,
        image_size=config.data.image_size,
        workers=workers,
        bad_records=config.data.bad_records,
        decode=config.data.decode,
    )
    return Loader(
        run.source,
        order,
        settings,
        rank=run.world.rank,
        world_size=run.world.size,
        device=run.world.device,
        start_step=run.state.step,
        stop_step=schedule.total_steps,
    )


def _batches(run: _Run, loader: Loader, say: Callable[[str], None]) -> Iterable[tuple[Batch, ...]]:
    """Return the batches, with what is to be done beside them."""
    drawing = run.world.is_leader and is_to_be_drawn(run.config)
    batches = written_meanwhile(run.config, run.source, loader) if drawing else loader
    return _recorded(run, batches, say) if run.profile else batches


def _recorded(
    run: _Run, batches: Iterable[tuple[Batch, ...]], say: Callable[[str], None]
) -> Iterator[tuple[Batch, ...]]:
    """Pass the batches on, and leave a profile of some steps in the run's folder."""
    folder, written = run.folder / "profile", False

    def tell(profile: Profile) -> None:
        nonlocal written
        written = True
        if run.world.is_leader:
            write_atomically(folder / "summary.txt", profile.told() + "\n")
            say(
                f"{profile.told()}\nwritten to {folder}: for ui.perfetto.dev, or tensorboard --logdir {folder}"
            )

    name = f"rank_{run.world.rank:05d}_from_{run.state.step:08d}.pt.trace.json.gz"
    yield from profiled(batches, folder / name, run.world.device, tell)
    if not written:
        say(f"nothing was profiled: that takes {WARM_UP + RECORDED + 1} steps")


def _build_hooks(
    run: _Run,
    recorder: Recorder,
    spikes: Recorder,
    step: TrainStep,
    loader: Loader,
    stop: StopRequest,
    say: Callable[[str], None],
    workers: int,
) -> RunHooks:
    config = run.config
    verifier = Verifier(
        run.sets,
        image_size=config.data.image_size,
        batch_size=config.eval.batch_size,
        device=run.world.device,
        workers=workers,
        check_stop=stop.raise_if_requested,
    )
    writer = CheckpointWriter(
        run.folder / "checkpoints",
        keep=config.checkpoint.keep,
        asynchronous=config.checkpoint.asynchronous,
        best_metric=config.checkpoint.best_metric,
    )
    meta = {"model": describe(config), "config": dump_config(config), "schedule": vars(run.schedule)}
    return RunHooks(
        recorder=recorder,
        spikes=spikes,
        step=step,
        loader=loader,
        verifier=verifier,
        writer=writer,
        stop=stop,
        meta=lambda _: meta,
        say=say,
        max_skipped=config.data.max_skipped,
        total_steps=run.schedule.total_steps,
        log_every=config.log.every_steps,
        verify_every=config.eval.every_steps,
        save_every=config.checkpoint.every_steps,
        save_every_minutes=config.checkpoint.every_minutes,
    )


def _open_recorder(run: _Run, *, resumed: bool) -> tuple[Recorder, Console | None]:
    if not run.world.is_leader:
        return Recorder(), None
    step = run.state.step
    resume_at = step if resumed else None
    console = Console(total_steps=run.schedule.total_steps, start_step=step)
    sinks: list[Sink] = [JsonLines(run.folder / "metrics.jsonl", resume_at=resume_at), console]
    wanted = run.config.log.tensorboard
    board = TensorBoard(run.folder / "tensorboard", resume_at=resume_at) if wanted else None
    return Recorder(sinks, board), console


def _open_spikes(run: _Run, *, resumed: bool) -> Recorder:
    if run.state.spikes is None or not run.world.is_leader:
        return Recorder()
    resume_at = run.state.step if resumed else None
    return Recorder([JsonLines(run.folder / "loss_spikes.jsonl", resume_at=resume_at)])


def _announce(console: Console, run: _Run) -> None:
    config, world, schedule, step = run.config, run.world, run.schedule, run.state.step
    console.print(
        f"{run.folder}: {run.source.num_images:,} images of {run.source.num_classes:,} identities; "
        f"{config.model.backbone}, {config.head.margin.type}; {schedule.total_steps:,} steps of "
        f"{schedule.global_batch_size:,} images on {world.size} × {world.device.type} in {config.train.precision}"
        + (f"; going on from step {step:,}" if step else "")
    )
