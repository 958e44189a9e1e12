"""Training runs: `train` starts a new run, `resume` continues one.

This module puts a run together. It builds every part from the config, loads the checkpoint of a resumed run, and hands
the parts to the training loop (`facetrain.training.loop.fit`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from facetrain.checkpoint.load import CheckpointChoice, open_on_all_ranks
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.config.loading import dump_config
from facetrain.config.schema import Config
from facetrain.data.loader import Batch
from facetrain.data.staged_loader import TrainLoader
from facetrain.distributed.agreement import explain_failures, only_leader_reports
from facetrain.distributed.process_setup import fix_cublas_workspace
from facetrain.distributed.stop_request import StopRequest
from facetrain.distributed.world import World, join
from facetrain.errors import CheckpointError, ConfigError, DivergedError, SkippedError
from facetrain.files import sync_folder, write_atomically
from facetrain.run.build import (
    build_augment,
    build_learning_check,
    build_loader,
)
from facetrain.run.build_execution import begin_trial
from facetrain.run.callbacks.checkpointing import Checkpointing, Stopping
from facetrain.run.callbacks.evaluation import Evaluation
from facetrain.run.callbacks.logging import Logging
from facetrain.run.folder import (
    create_run_folder,
    is_restart,
    launchers_of,
    prepare_checkpoints,
    remove_if_empty,
)
from facetrain.run.lock import locked
from facetrain.run.open_data import must_generate, write_while_training
from facetrain.run.outputs import (
    described_model,
    open_loss_spikes,
    open_metrics,
    opening_line,
    report_config_changes,
    report_skipped_files,
    write_dataset_cards,
    write_results,
    write_skipped_images,
)
from facetrain.run.prepare import PreparedRun, prepare_run
from facetrain.run.run_state import Start, train_recorded
from facetrain.telemetry.log import logger, stop_logging
from facetrain.telemetry.recorder import Recorder
from facetrain.training.deterministic import deterministic_algorithms
from facetrain.training.loop import Callbacks, Intervals, fit
from facetrain.training.precision import tf32_convolutions
from facetrain.training.profile import RECORDED_STEPS, WARM_UP_STEPS, Profile, profiled
from facetrain.training.step import TrainStep
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
                return _run(
                    prepare_run(config, world, folder, checkpoint, lock, profile=profile, set_keys=set_keys)
                )
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
        return _run(
            prepare_run(
                config, world, run_dir, checkpoint, lock, profile=profile, set_keys=set_keys, adopt=adopt
            )
        )


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


def _run(run: PreparedRun) -> int:
    """Train a prepared run, with its state in the run folder; return the exit code."""
    try:
        if not run.world.is_leader:
            return _train(run)
        start = Start(step=run.state.step, ranks=run.world.size, device=run.world.device.type)
        return train_recorded(run.folder, start, run.schedule.total_steps, lambda: _train(run))
    finally:
        stop_logging(run.log)


def _train(run: PreparedRun) -> int:
    """Train, and write the results; return the exit code."""
    config, state, schedule = run.config, run.state, run.schedule
    first_step = state.step
    recorder, console = open_metrics(run)
    spike_recorder = open_loss_spikes(run)
    # The leader has a console, other ranks have their log.
    print_message = console.print if console else logger.info

    def report(line: str) -> None:
        """Write a line to the log, and on the leader to the console too."""
        logger.info(line)
        if console:
            console.print(line)

    if console:
        report(opening_line(run))
        report_config_changes(run, recorder, report)
        report_skipped_files(run, console.print)
        write_dataset_cards(run)
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
                images_after=schedule.images_after,
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
            fit(
                state,
                _batches(run, loader, print_message, report),
                step,
                callbacks,
                intervals,
                resumed=run.resumed,
            )
            checkpointing.finish()
            if state.step == schedule.total_steps and state.step > first_step:
                checkpointing.require_saved(state)
        except (CheckpointError, ConfigError, DivergedError, SkippedError) as error:
            # All ranks raise these together, so they can still commit the checkpoint in flight: it is from before.
            checkpointing.finish()
            write_skipped_images(run, loader)
            if isinstance(error, DivergedError) and run.world.is_leader:
                with suppress(OSError):  # a full disk must not hide the reason why the run ended
                    write_atomically(run.folder / "diverged.json", json.dumps(error.report) + "\n")
            raise only_leader_reports(run.world, error) from error
        finally:
            loader.close()
            recorder.close()
            spike_recorder.close()
    skipped = write_skipped_images(run, loader)
    if stopping.signal:
        print_message(
            f"stopped at step {state.step}; `facetrain resume {run.folder}` continues from step "
            f"{checkpointing.last_saved}"
        )
        return 128 + stopping.signal  # as a shell reports a process that a signal has ended
    write_results(run, skipped)
    return 0


def _batches(
    run: PreparedRun,
    loader: TrainLoader,
    print_message: Callable[[str], None],
    report: Callable[[str], None],
) -> Iterable[tuple[Batch, ...]]:
    """Return the batches; while they are consumed, a synthetic dataset is written and a profile recorded."""
    generates = run.world.is_leader and must_generate(run.config)
    batches = write_while_training(run.config, run.source, loader) if generates else loader
    if len(run.schedule.stages) > 1:
        batches = _batches_in_stages(run, batches, report)
    return _profiled_batches(run, batches, print_message) if run.profile else batches


def _batches_in_stages(
    run: PreparedRun, batches: Iterable[tuple[Batch, ...]], report: Callable[[str], None]
) -> Iterator[tuple[Batch, ...]]:
    """Yield the batches, and report the beginning of each stage."""
    first_steps = {stage.first_step: stage for stage in run.schedule.stages}
    for micro_batches in batches:
        stage = first_steps.get(micro_batches[0].step)
        if stage is not None:
            # CUDA graphs fit batches of one shape; torch.compile notices another one by itself.
            run.execution.record_again()
            number = run.schedule.stages.index(stage) + 1
            report(
                f"stage {number} of {len(run.schedule.stages)}, from step {stage.first_step:,} (epoch "
                f"{stage.first_epoch}) to step {stage.stop_step:,}: {stage.describe()}"
            )
        yield micro_batches


def _profiled_batches(
    run: PreparedRun, batches: Iterable[tuple[Batch, ...]], print_message: Callable[[str], None]
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


def _build_verifier(run: PreparedRun, stop_request: StopRequest) -> Verifier:
    return Verifier(
        run.sets,
        image_size=run.config.data.image_size,
        batch_size=run.config.eval.batch_size,
        device=run.world.device,
        workers=run.workers,
        check_stop=stop_request.raise_if_requested,
    )


def _build_checkpointing(
    run: PreparedRun,
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
        "model": described_model(run),
        "config": dump_config(config),
        "schedule": asdict(run.schedule),
        "run_id": run.run_id,
        "dataset": run.digests.labels,
        "landmarks": run.digests.landmarks,
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
