"""Preparation of a run: data, network, head and optimizers, restored from a checkpoint if there is one."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from facetrain.checkpoint.identity import new_run_id, read_run_id, run_id_of
from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import dump_config, with_absolute_paths
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.data.loading.sampler import epoch_size
from facetrain.distributed import collectives
from facetrain.distributed.agreement import fail_together, failing_alike
from facetrain.distributed.ddp import wrap_in_ddp
from facetrain.distributed.world import World
from facetrain.errors import RunError
from facetrain.files import os_errors_as
from facetrain.run.callbacks.evaluation import named_metrics, require_metric
from facetrain.run.choices import NO_CHOICES, Choices, with_rate
from facetrain.run.folder.compatibility import (
    ConfigChange,
    check_compatibility,
    check_meaning,
    describe_batch_change,
    find_config_changes,
)
from facetrain.run.folder.create import (
    missing_newest,
    package_versions,
    recorded_environment,
    rename_later_checkpoints,
    write_run_files,
)
from facetrain.run.folder.data_digests import check_inputs, digest_inputs
from facetrain.run.folder.hosts import Hosts
from facetrain.run.folder.lock import RunLock
from facetrain.run.lr_range_test import RangeTest, require_steps_of_test, run_range_test
from facetrain.run.parts.loader import build_augment, build_loader, count_workers
from facetrain.run.parts.open_data import open_data
from facetrain.run.parts.state import build_state, check_precision
from facetrain.run.parts.step_schedule import StepSchedule, schedule_steps
from facetrain.run.start_checks import check_start
from facetrain.telemetry.log import LogFile, log_to, warn
from facetrain.training.choose_kernels import choose_kernels
from facetrain.training.state import TrainState
from facetrain.training.step import TrainStep
from facetrain.verify.sets.pair_set import PairSet


@dataclass(frozen=True)
class RunIdentity:
    """Id of a run and what it reads, compared with its checkpoint. Only the leader has it; other ranks have none."""

    run_id: str = ""
    """Random id of the run."""
    digests: Mapping[str, Any] = field(default_factory=dict)
    """Digests of what the run reads, by name (`digest_inputs`)."""
    changes: Sequence[ConfigChange] = ()
    """Config keys whose values differ from those in the checkpoint."""


@dataclass(frozen=True)
class PreparedRun:
    """Parts of a run that its other parts are built from. Its log is open."""

    config: Config
    folder: Path
    source: FaceDataset
    sets: list[PairSet]
    schedule: StepSchedule
    state: TrainState
    network: nn.Module
    """Network for training steps, in DDP if there are several ranks."""
    workers: int
    """Reading processes of this rank."""
    resumed: bool
    """Whether the state comes from a checkpoint."""
    started_at: float
    """Start of the command, by time.perf_counter."""
    identity: RunIdentity
    check_lock: Callable[[], None]
    """Raises an error if another process writes the run folder; only on the leader."""
    log: LogFile
    """log.txt, as this process writes it."""
    hosts: Hosts
    """Disks of the hosts, and the mirror."""
    chosen: tuple[str, ...] = ()
    """What the run has chosen itself and why, a line each."""

    @property
    def world(self) -> World:
        """The ranks of the run."""
        return self.state.world


def prepare_run(
    config: Config,
    world: World,
    folder: Path,
    checkpoint: Checkpoint | None,
    lock: RunLock | None,
    hosts: Hosts,
    *,
    set_keys: Set[str],
    choices: Choices = NO_CHOICES,
) -> PreparedRun:
    """Build every part that does not depend on the training loop, and restore the checkpoint. Collective.

    Args:
        config: settings, as they were given.
        world: the ranks of the run.
        folder: run folder.
        checkpoint: checkpoint to continue from; None for a new run.
        lock: lock of the run folder, on the leader.
        hosts: disks of the hosts, and the mirror.
        set_keys: config keys that the command line sets.
        choices: what a new run chooses itself.

    Raises:
        RunError: the run folder cannot be written, or the checkpoint does not fit the config.
        DataError: the data cannot be read.
    """
    started_at = time.perf_counter()
    # The config in the run folder must lead to the same files from any folder.
    with fail_together(world):
        config = with_absolute_paths(config)
    if checkpoint is not None:
        config = choices.with_recorded(config, checkpoint, set_keys)
    chosen = list[str]()
    # One block after the other: if the data or the checkpoint is refused, no rank builds a network first.
    with fail_together(world):
        check_precision(config, world)
        source, sets = open_data(config)
    if choices.batch and checkpoint is None:
        with failing_alike(world):
            config, line = choices.batch(config, world, source)
        chosen.append(line)
    with fail_together(world):
        schedule = schedule_steps(config, epoch_size(source), world.size)
        if choices.lr and checkpoint is None:
            require_steps_of_test(schedule.stages[0].stop_step)
    identity, test = RunIdentity(), None
    with fail_together(world):
        if checkpoint is not None:
            check_compatibility(checkpoint, config, total_steps=schedule.total_steps)
        # Only the leader: it writes what they are compared with, and one rank's error ends all.
        if world.is_leader:
            identity = _identify(config, folder, checkpoint, source, sets, set_keys)
            if hosts.mirror:
                hosts.mirror.check_run(identity.run_id)
    run_id = collectives.broadcast_json(identity.run_id)
    if choices.lr and checkpoint is None:
        with failing_alike(world):
            test = _test_rates(config, world, source, schedule, folder)
        config = with_rate(config, test.lr)
        gc.collect()  # the memory may not hold a second network and its head
    to_build = config if checkpoint is None else _without_init_from(config)
    state, network = _build(to_build, world, source, schedule, folder)
    with fail_together(world):
        if checkpoint is not None:
            state.restore(checkpoint)
        # After the restore, which knows what the last verification has measured.
        _check_named_metrics(config, sets, state)
    # After every rank has restored its part: if the checkpoint is damaged, or the config does not fit it, the folder
    # must remain unchanged.
    warnings: list[str] = []
    with fail_together(world):
        if world.is_leader:
            warnings += check_start(config, folder, source, state, schedule.total_steps - state.step)
            if checkpoint is not None:
                warnings += _continue_folder(folder, checkpoint.step)
                warnings += describe_batch_change(checkpoint, config, schedule, world.size)
                if hosts.mirror:
                    hosts.mirror.leave_after(checkpoint.step)
            if test is not None:
                test.write(folder)
                chosen.append(test.describe())
        if hosts.is_owner:
            if checkpoint is not None and not world.is_leader:
                with os_errors_as(RunError, folder):
                    rename_later_checkpoints(folder, checkpoint.step)
            execution = state.describe_execution()
            write_run_files(folder, world, dump_config(config), run_id, execution=execution)
    # Not earlier: on the other hosts of a refused resume, the folder must remain unchanged too.
    log = log_to(folder / "log.txt", world.rank)
    for warning in warnings:
        warn(warning)
    return PreparedRun(
        config=config,
        folder=folder,
        source=source,
        sets=sets,
        schedule=schedule,
        state=state,
        network=network,
        workers=count_workers(config, world),
        resumed=checkpoint is not None,
        started_at=started_at,
        identity=identity,
        check_lock=lock.require_held if lock else lambda: None,  # only the leader has the lock
        log=log,
        hosts=hosts,
        chosen=tuple(chosen),
    )


def _identify(
    config: Config,
    folder: Path,
    checkpoint: Checkpoint | None,
    source: FaceDataset,
    sets: list[PairSet],
    set_keys: Set[str],
) -> RunIdentity:
    """Return the identity of a run.

    Raises:
        ConfigError: the run has read other data, or was trained with other settings, which `set_keys` do not allow.
    """
    # A copied folder of checkpoints has no id: the run goes on under the id of its checkpoint.
    known = checkpoint and (read_run_id(folder) or run_id_of(checkpoint.manifest))
    digests, changes = digest_inputs(config, source, sets), list[ConfigChange]()
    if checkpoint is not None:
        changes = find_config_changes(checkpoint, config)
        check_meaning(checkpoint, changes, set_keys)
        check_inputs(checkpoint, digests, source.num_classes, set_keys)
    return RunIdentity(known or new_run_id(), digests, changes)


def _without_init_from(config: Config) -> Config:
    """Return the config of a run that continues: its checkpoint has all weights of the file `model.init_from`."""
    return config.model_copy(update={"model": config.model.model_copy(update={"init_from": None})})


def _build(
    config: Config, world: World, source: FaceDataset, schedule: StepSchedule, folder: Path
) -> tuple[TrainState, nn.Module]:
    """Build the state of a run before its first step, and its network for training steps. Collective."""
    # Each rank builds the whole backbone from the same seed, and its own part of the class centers: nothing is sent.
    with fail_together(world):
        state = build_state(config, world, source.num_classes, schedule, folder, source)
        # All labels now, on the host: on a GPU, the head does not check those of a step.
        state.head.check_labels(source.labels)
    # Apart from the block above: ranks exchange whether they can use the kernels, and all must take part.
    choose_kernels(state, config.train)
    network = wrap_in_ddp(
        state.network, world, config.train.compress_gradients, accumulate=config.optim.accumulate
    )
    return state, network


def _test_rates(
    config: Config, world: World, source: FaceDataset, schedule: StepSchedule, folder: Path
) -> RangeTest:
    """Find the learning rate with a state that is thrown away: the run builds another one. Collective."""
    first = schedule.stages[0]
    if world.is_leader:
        print("--lr find: training with a growing learning rate, at most 100 steps", flush=True)
    state, network = _build(config, world, source, schedule, folder)
    # The test ends itself when the loss is not finite.
    step = TrainStep(network, build_augment(config), max_skipped_steps=first.stop_step + 1)
    loader = build_loader(config, world, source, schedule, workers=count_workers(config, world), start_step=0)
    try:
        return run_range_test(config, state, step, loader, steps=first.stop_step, lr_factor=first.lr_factor)
    finally:
        loader.close()


def _check_named_metrics(config: Config, sets: list[PairSet], state: TrainState) -> None:
    """Check the metrics that the config names as far as they are known before the next verification.

    A resumed run may save before that, and would remove the best checkpoint by another metric.
    """
    names = [pairs.name for pairs in sets]
    known = [name for name in state.metrics if name.rpartition("/")[0] in names]
    for key, metric in named_metrics(config.checkpoint.best_metric, config.train.stop_early).items():
        chosen = metric.rpartition("/")[0]
        if chosen not in names or any(name.rpartition("/")[0] == chosen for name in known):
            require_metric(key, metric, known or [f"{name}/accuracy, {name}/auc, …" for name in names])


def _continue_folder(folder: Path, step: int) -> list[str]:
    """Make the checkpoint of a step the newest of the run folder; return what differs from the run's last command."""
    environment = recorded_environment(folder)
    recorded, threads = environment.get("threads"), torch.get_num_threads()
    with os_errors_as(RunError, folder):
        missing = missing_newest(folder)
        # Newer checkpoints belong to the course that this run leaves: they are kept under names that no resume finds.
        renamed = rename_later_checkpoints(folder, step)
    differences = []
    if missing is not None:
        differences.append(f"going back to step {step}: {missing}, the newest checkpoint, is missing")
    if renamed:
        names = ", ".join(renamed)
        differences.append(f"going back to step {step}: the newer checkpoints are kept as {names}")
    if recorded not in (None, threads):
        differences.append(
            f"this process computes with {threads} threads, and the run did with {recorded} before: on a CPU its "
            f"numbers may differ in the last digits; set OMP_NUM_THREADS={recorded} to continue bit for bit"
        )
    before, now = environment.get("packages"), package_versions()
    versions = [
        f"{name} {before[name]} → {version}"
        for name, version in now.items()
        if isinstance(before, dict) and before.get(name, version) != version
    ]
    if versions:
        differences.append(
            f"the versions of packages have changed: {', '.join(versions)}; numbers may differ in the last digits"
        )
    return differences
