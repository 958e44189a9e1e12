"""Training runs: `train` starts a new run, `resume` continues one.

This module puts a run together. It builds every part from the config, loads the checkpoint of a resumed run, and hands
the parts to the training loop (`facetrain.training.loop.fit`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from facetrain.checkpoint.identity import adopt_checkpoint, new_run_id, read_run_id, run_id_of
from facetrain.checkpoint.load import Checkpoint, CheckpointChoice, open_on_all_ranks
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.config.loading import (
    describe_changed_paths,
    dump_config,
    with_absolute_paths,
)
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset, skipped_files
from facetrain.data.loader import Batch, Loader
from facetrain.data.sampler import epoch_size
from facetrain.data.skipped_files import skipped_summary, skipped_table
from facetrain.distributed.agreement import explain_failures, fail_together, only_leader_reports
from facetrain.distributed.ddp import wrap_in_ddp
from facetrain.distributed.process_setup import fix_cublas_workspace
from facetrain.distributed.stop_request import StopRequest
from facetrain.distributed.world import World, join
from facetrain.errors import CheckpointError, ConfigError, DivergedError, RunError, SkippedError
from facetrain.files import os_errors_as, sync_folder, write_atomically
from facetrain.models.model_file import save_model
from facetrain.run.build import (
    build_augment,
    build_learning_check,
    build_loader,
    build_state,
    check_decoder,
    count_workers,
    describe_model,
)
from facetrain.run.build_execution import begin_trial, build_execution
from facetrain.run.callbacks.checkpointing import Checkpointing, Stopping
from facetrain.run.callbacks.evaluation import Evaluation
from facetrain.run.callbacks.logging import Logging, open_recorder
from facetrain.run.compatibility import (
    ConfigChange,
    check_compatibility,
    check_meaning,
    digest_labels,
    find_config_changes,
)
from facetrain.run.curves import plot_curves
from facetrain.run.folder import (
    create_run_folder,
    is_restart,
    launchers_of,
    missing_newest,
    prepare_checkpoints,
    recorded_threads,
    remove_if_empty,
    rename_later_checkpoints,
    write_run_files,
)
from facetrain.run.lock import RunLock, locked
from facetrain.run.open_data import must_generate, open_data, write_while_training
from facetrain.run.run_state import Start, train_recorded
from facetrain.run.step_schedule import StepSchedule, schedule_steps
from facetrain.run.summary import summarize
from facetrain.telemetry.console import Console
from facetrain.telemetry.jsonl import JsonLines
from facetrain.telemetry.log import LogFile, log_to, logger, stop_logging, warn
from facetrain.telemetry.recorder import Recorder
from facetrain.training.deterministic import deterministic_algorithms
from facetrain.training.execution import Execution
from facetrain.training.loop import Callbacks, Intervals, fit
from facetrain.training.precision import tf32_convolutions
from facetrain.training.profile import RECORDED_STEPS, WARM_UP_STEPS, Profile, profiled
from facetrain.training.state import TrainState, averaged_state
from facetrain.training.step import TrainStep
from facetrain.verify.pair_set import PairSet
from facetrain.verify.verifier import Verifier


def train(
    config: Config,
    run_dir: Path | None = None,
    *,
    profile: bool = False,
    set_keys: Set[str] = frozenset(),
) -> int:
    """Train a new run on this rank; return the exit code. Collective.

    If torch's elastic launcher has restarted the workers, the run continues from its newest checkpoint. `profile`
    records a few steps in the run folder. `set_keys` are the config keys that the command line sets.
    """
    with _joined_world(config) as world:
        default = Path(config.run.dir) / config.run.name
        is_new = run_dir is None or not run_dir.exists()
        folder, restarted = create_run_folder(world, given=run_dir, default=default)
        try:
            with locked(world, folder, launchers_of(world)) as lock:
                prepare_checkpoints(world, folder, is_new_run=not restarted)
                checkpoint = open_on_all_ranks(world, folder) if restarted else None
                return _run(config, world, folder, checkpoint, lock, profile=profile, set_keys=set_keys)
        finally:
            if is_new:
                remove_if_empty(folder, world)


def resume(
    config: Config,
    run_dir: Path,
    step: CheckpointChoice = None,
    *,
    profile: bool = False,
    set_keys: Set[str] = frozenset(),
    adopt: bool = False,
) -> int:
    """Continue a run from the checkpoint of a step, by default the newest; return the exit code. Collective.

    `adopt` accepts a checkpoint of another run, or one that was renamed, as one of this run. The other options are
    those of `train`.
    """
    with _joined_world(config) as world, locked(world, run_dir, launchers_of(world)) as lock:
        prepare_checkpoints(world, run_dir, is_new_run=False)
        # After a restart, the run has newer checkpoints than the one that the command line asks for.
        requested = None if is_restart(run_dir, world) else step
        checkpoint = open_on_all_ranks(world, run_dir, requested, adopt=adopt)
        return _run(config, world, run_dir, checkpoint, lock, profile=profile, set_keys=set_keys, adopt=adopt)


@contextmanager
def _joined_world(config: Config) -> Iterator[World]:
    """Join the process group for the duration of the context."""
    timeout_s = config.train.timeout_s
    deterministic = config.train.deterministic
    if deterministic:
        fix_cublas_workspace()
    joining = join(config.train.device, timeout_s=timeout_s, keep_freed=config.train.keep_freed_memory)
    with (
        joining as world,
        explain_failures(world, timeout_s),
        deterministic_algorithms(deterministic),
        tf32_convolutions(config.train.tf32),
    ):
        yield world


@dataclass(frozen=True)
class _Run:
    """Parts of a run that its other parts are built from."""

    config: Config
    world: World
    folder: Path
    source: FaceDataset
    sets: list[PairSet]
    schedule: StepSchedule
    state: TrainState
    execution: Execution
    network: nn.Module
    """Network for training steps, in DDP if there are several ranks."""
    workers: int
    """Reading processes of this rank."""
    resumed: bool
    """Whether the state comes from a checkpoint."""
    started_at: float
    """Start of the command, by time.perf_counter."""
    profile: bool
    """Whether to record a few steps."""
    run_id: str
    """Random id of the run; only the leader has it."""
    dataset: str
    """Digest of the training data; only the leader has it."""
    changes: list[ConfigChange]
    """Config keys whose values differ from those in the checkpoint."""
    check_lock: Callable[[], None]
    """Raises an error if another process writes the run folder; only on the leader."""
    log: LogFile
    """log.txt, as this process writes it."""


def _run(
    config: Config,
    world: World,
    folder: Path,
    checkpoint: Checkpoint | None,
    lock: RunLock | None,
    *,
    profile: bool,
    set_keys: Set[str],
    adopt: bool = False,
) -> int:
    started_at = time.perf_counter()
    given, config = config, with_absolute_paths(config)
    workers = count_workers(config, world)
    with fail_together(world):
        check_decoder(config, world)
        source, sets = open_data(config, workers=workers)
        schedule = schedule_steps(config, epoch_size(source), world.size)
        dataset = digest_labels(source) if world.is_leader else ""
        run_id = _run_id(folder, checkpoint) if world.is_leader else ""
        changes = find_config_changes(checkpoint, config) if checkpoint is not None else []
        if checkpoint is not None:
            check_compatibility(checkpoint, config, schedule)
            if world.is_leader:
                check_meaning(checkpoint, changes, dataset, source.num_classes, set_keys)
        state = build_state(config, world, source.num_classes, schedule, folder, source)
        state.head.check_labels(source.labels)
        execution = build_execution(config, world, state.network, schedule)
    network = wrap_in_ddp(
        execution.network, world, config.train.compress_gradients, accumulate=config.optim.accumulate
    )
    threads_before: int | None = None
    left: list[str] = []
    missing: str | None = None
    with fail_together(world):
        if checkpoint is not None:
            state.restore(checkpoint)
        if world.is_leader:
            # After restore: if the config does not fit the checkpoint, the folder must remain unchanged.
            if checkpoint is not None:
                threads_before = recorded_threads(folder)
                with os_errors_as(RunError, folder):
                    missing = missing_newest(folder)
                    if adopt:
                        adopt_checkpoint(checkpoint.folder, checkpoint.manifest, run_id)
                    left = rename_later_checkpoints(folder, checkpoint.step)
            write_run_files(
                folder, world, describe_changed_paths(given, config) + dump_config(config), run_id
            )
    log = log_to(folder / "log.txt", world.rank)
    try:
        resumed = checkpoint is not None
        run = _Run(
            config, world, folder, source, sets, schedule, state, execution, network, workers, resumed,
            started_at, profile, run_id, dataset, changes, lock.require_held if lock else _accept, log,
        )  # fmt: skip
        if missing is not None:
            warn(f"going back to step {state.step}: {missing}, the newest checkpoint, is missing")
        if left:
            warn(f"going back to step {state.step}: the newer checkpoints are kept as {', '.join(left)}")
        if threads_before not in (None, torch.get_num_threads()):
            logger.warning(
                "this process computes with %d threads, and the run did with %d before: on a CPU its numbers may "
                "differ in the last digits; set OMP_NUM_THREADS=%d to continue bit for bit",
                torch.get_num_threads(),
                threads_before,
                threads_before,
            )
        if not world.is_leader:
            return _train(run)
        start = Start(step=state.step, ranks=world.size, device=world.device.type)
        return train_recorded(folder, start, schedule.total_steps, lambda: _train(run))
    finally:
        stop_logging(log)


def _accept() -> None:
    """Check nothing: only the leader has the lock."""


def _run_id(folder: Path, checkpoint: Checkpoint | None) -> str:
    """Return the id of a run: of the folder, else of the checkpoint that it continues from, else a new one."""
    if checkpoint is None:
        return new_run_id()
    return read_run_id(folder) or run_id_of(checkpoint.manifest) or new_run_id()


def _train(run: _Run) -> int:
    """Train, and write the results; return the exit code."""
    config, state, schedule = run.config, run.state, run.schedule
    first_step = state.step
    recorder, console = _open_recorder(run)
    spike_recorder = _open_spike_recorder(run)
    print_message = (
        console.print if console else logger.info
    )  # the leader has a console, other ranks their log

    def report(line: str) -> None:
        """Write a line to the log, and on the leader to the console too."""
        logger.info(line)
        if console:
            console.print(line)

    if console:
        report(_opening_line(run))
        _report_config_changes(run, recorder, report)
        _report_skipped_files(run, console.print)
    loader = build_loader(config, run.world, run.source, schedule, workers=run.workers, start_step=first_step)
    step = TrainStep(
        run.network,
        build_augment(config),
        max_skipped_steps=config.train.max_skipped_steps,
        trial=begin_trial(run.execution, state, schedule, report),
    )
    with StopRequest() as stop_request:
        stopping = Stopping(stop_request, print_message)
        checkpointing = _build_checkpointing(run, recorder, spike_recorder, print_message, loader.skipped)
        callbacks = Callbacks(
            logging=Logging(
                recorder,
                spike_recorder,
                step,
                loader,
                print_message,
                total_steps=schedule.total_steps,
                max_skipped_images=config.data.max_skipped,
                check_lock=run.check_lock,
                learning_check=build_learning_check(config, state, schedule),
            ),
            evaluation=Evaluation(_build_verifier(run, stop_request), recorder),
            checkpointing=checkpointing,
            stopping=stopping,
        )
        intervals = Intervals(
            log=config.log.every_steps,
            verify=config.eval.every_steps,
            save=config.checkpoint.every_steps,
            total_steps=schedule.total_steps,
        )
        try:
            fit(state, _batches(run, loader, print_message), step, callbacks, intervals, resumed=run.resumed)
            checkpointing.finish()
            if state.step == schedule.total_steps and state.step > first_step:
                checkpointing.require_saved(state)
        except (CheckpointError, ConfigError, DivergedError, SkippedError) as error:
            # All ranks raise these together, so they can still commit the checkpoint in flight: it is from before.
            checkpointing.finish()
            _write_skipped_images(run, loader)
            if isinstance(error, DivergedError) and run.world.is_leader:
                with suppress(OSError):  # a full disk must not hide the reason why the run ended
                    write_atomically(run.folder / "diverged.json", json.dumps(error.report) + "\n")
            raise only_leader_reports(run.world, error) from error
        finally:
            loader.close()
            recorder.close()
            spike_recorder.close()
    skipped = _write_skipped_images(run, loader)
    if stopping.signal:
        print_message(
            f"stopped at step {state.step}; `facetrain resume {run.folder}` continues from step "
            f"{checkpointing.last_saved}"
        )
        return 128 + stopping.signal  # as a shell reports a process that a signal has ended
    _write_results(run, skipped)
    return 0


def _report_config_changes(run: _Run, recorder: Recorder, report: Callable[[str], None]) -> None:
    """Report every config key whose value is not that of the checkpoint: printed, in log.txt and in metrics.jsonl."""
    for change in run.changes:
        line = f"config changed since the checkpoint of step {run.state.step}: {change}"
        report(line)
        recorder.note(run.state.step, {"config_key": change.key, "before": change.before, "now": change.now})


def _report_skipped_files(run: _Run, print_message: Callable[[str], None]) -> None:
    """Print the counts of the files of the dataset that are not images of it, and list them in the run folder."""
    skipped = skipped_files(run.source)
    if skipped:
        path = run.folder / "skipped_files.csv"
        write_atomically(path, skipped_table(skipped))
        print_message(
            f"{len(skipped):,} files of {run.config.data.train} are left out, see {path}: "
            + "; ".join(skipped_summary(skipped))
        )


def _write_skipped_images(run: _Run, loader: Loader) -> list[str]:
    """Write the list of images that any rank could not read, and return it. Collective."""
    run.state.add_skipped_images(loader.skipped)
    skipped = sorted(run.state.skipped_images)
    if skipped and run.world.is_leader:
        write_atomically(run.folder / "skipped_images.txt", "\n".join(skipped) + "\n")
    return skipped


def _write_results(run: _Run, skipped: list[str]) -> None:
    """Write the model file and the plot, and print the summary. Collective."""
    weights = averaged_state(run.state.backbone)
    if not run.world.is_leader:
        return
    save_model(run.folder / "model.safetensors", weights, describe_model(run.config))
    plot_curves(run.folder / "metrics.jsonl", run.folder / "curves.png")
    steps_of_all_epochs = run.schedule.steps_per_epoch * run.config.train.epochs
    summary = summarize(
        run.folder,
        run.config.eval.targets,
        run.config.eval_dir,
        ended_by="train.max_steps" if run.schedule.total_steps < steps_of_all_epochs else "train.epochs",
        skipped=skipped,
        seconds=time.perf_counter() - run.started_at,
    )
    print(summary)


def _batches(run: _Run, loader: Loader, print_message: Callable[[str], None]) -> Iterable[tuple[Batch, ...]]:
    """Return the batches; while they are consumed, a synthetic dataset is written and a profile recorded."""
    generates = run.world.is_leader and must_generate(run.config)
    batches = write_while_training(run.config, run.source, loader) if generates else loader
    return _profiled_batches(run, batches, print_message) if run.profile else batches


def _profiled_batches(
    run: _Run, batches: Iterable[tuple[Batch, ...]], print_message: Callable[[str], None]
) -> Iterator[tuple[Batch, ...]]:
    """Yield the batches, and write a profile of a few steps to the run folder."""
    folder, has_profile = run.folder / "profile", False

    def write(profile: Profile) -> None:
        nonlocal has_profile
        has_profile = True
        if run.world.is_leader:
            summary = profile.format_summary()
            write_atomically(folder / "summary.txt", summary + "\n")
            print_message(
                f"{summary}\nprofile written to {folder}; open it in ui.perfetto.dev or with "
                f"tensorboard --logdir {folder}"
            )

    name = f"rank_{run.world.rank:05d}_from_{run.state.step:08d}.pt.trace.json.gz"
    yield from profiled(batches, folder / name, run.world.device, write)
    if not has_profile:
        print_message(f"nothing was profiled: that takes {WARM_UP_STEPS + RECORDED_STEPS + 1} steps")


def _build_verifier(run: _Run, stop_request: StopRequest) -> Verifier:
    return Verifier(
        run.sets,
        image_size=run.config.data.image_size,
        batch_size=run.config.eval.batch_size,
        device=run.world.device,
        workers=run.workers,
        check_stop=stop_request.raise_if_requested,
    )


def _build_checkpointing(
    run: _Run,
    recorder: Recorder,
    spike_recorder: Recorder,
    print_message: Callable[[str], None],
    skipped: Sequence[str],
) -> Checkpointing:
    config = run.config

    def sync_run() -> None:
        run.log.sync()
        recorder.sync()
        spike_recorder.sync()
        if run.world.is_leader:
            sync_folder(run.folder)  # the names of these files, which are new in a new run

    writer = CheckpointWriter(
        run.folder / "checkpoints",
        keep=config.checkpoint.keep,
        asynchronous=config.checkpoint.asynchronous,
        best_metric=config.checkpoint.best_metric,
        sync_run=sync_run,
    )
    meta = {
        "model": describe_model(config),
        "config": dump_config(config),
        "schedule": vars(run.schedule),
        "run_id": run.run_id,
        "dataset": run.dataset,
    }
    return Checkpointing(
        writer,
        recorder,
        meta,
        print_message,
        every_minutes=config.checkpoint.every_minutes,
        skipped=skipped,
        check_lock=run.check_lock,
    )


def _open_recorder(run: _Run) -> tuple[Recorder, Console | None]:
    """Open the outputs of the metrics on the leader; the other ranks have none."""
    if not run.world.is_leader:
        return Recorder(), None
    console = Console(total_steps=run.schedule.total_steps, start_step=run.state.step)
    resume_at = run.state.step if run.resumed else None
    recorder = open_recorder(run.config, run.folder, console, run_id=run.run_id, resume_at=resume_at)
    return recorder, console


def _open_spike_recorder(run: _Run) -> Recorder:
    if run.state.spike_detector is None or not run.world.is_leader:
        return Recorder()
    resume_at = run.state.step if run.resumed else None
    return Recorder(journal=JsonLines(run.folder / "loss_spikes.jsonl", resume_at=resume_at))


def _uses_tf32(run: _Run) -> bool:
    return run.world.device.type == "cuda" and run.config.train.precision == "fp32" and run.config.train.tf32


def _opening_line(run: _Run) -> str:
    config, world, schedule, step = run.config, run.world, run.schedule, run.state.step
    return (
        f"{run.folder}: {run.source.num_images:,} images of {run.source.num_classes:,} identities; "
        f"{config.model.backbone}, {config.head.margin.type}; {schedule.total_steps:,} steps of "
        f"{schedule.global_batch_size:,} images on {world.size} × {world.device.type} in {config.train.precision}"
        + (" (convolutions in TF32)" if _uses_tf32(run) else "")
        + (f"; resuming from step {step:,}" if step else "")
    )
