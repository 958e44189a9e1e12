"""Construction of the parts of a run from its plan: state and network, restored from a checkpoint if there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from facetrain.checkpoint.load import Checkpoint
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.data.images.augment import Augment
from facetrain.data.loading.sampler import epoch_size
from facetrain.distributed.agreement import fail_together
from facetrain.distributed.ddp import wrap_in_ddp
from facetrain.distributed.process_setup import write_collectives_to
from facetrain.distributed.world import World
from facetrain.errors import DamagedCheckpointError, RunError
from facetrain.files import os_errors_as
from facetrain.head.head_group import head_parts
from facetrain.remote.address import public
from facetrain.run.agree import Agreed
from facetrain.run.batch_change import describe_batch_change
from facetrain.run.folder.accepted import Accepted
from facetrain.run.folder.data_digests import changed_inputs
from facetrain.run.folder.earlier import leave_after, missing_newest
from facetrain.run.folder.environment import (
    ACCEPTED,
    IDENTITIES,
    IMAGES,
    describe_environment,
    environment_changes,
    recorded_environment,
)
from facetrain.run.folder.run_files import log_of_host, write_run_files
from facetrain.run.outputs import open_sinks
from facetrain.run.parts.loader import build_augment
from facetrain.run.parts.state import build_state, check_precision, read_identities
from facetrain.run.parts.step_schedule import StepSchedule
from facetrain.run.run_plan import RunPlan
from facetrain.run.start_checks import check_start
from facetrain.telemetry.log import LogFile, log_to, stop_logging, warn
from facetrain.telemetry.sink import Sinks
from facetrain.training.choose_kernels import choose_kernels
from facetrain.training.state import TrainState


@dataclass(frozen=True)
class Parts(Agreed):
    """What was agreed on a run, and the parts that this rank has built after it. Its log and its sinks are open."""

    state: TrainState
    network: nn.Module
    """Network for training steps, in DDP if there are several ranks."""
    augment: Augment
    log: LogFile
    """Log of this host, as this process writes it."""
    sinks: Sinks | None
    """Sinks of the run; only on the leader."""
    check_lock: Callable[[], None]
    """Raises an error if another process writes the run folder; only on the leader."""
    began_at: float
    """Start of the command, by time.perf_counter."""

    @property
    def world(self) -> World:
        """The ranks of the run."""
        return self.state.world

    @property
    def is_leader(self) -> bool:
        """Whether this rank writes what is written once for a run."""
        return self.world.is_leader

    @property
    def early_stop(self) -> str:
        """Reason of `train.stop_early` to take no more steps; empty if there is none."""
        return self.state.early_stop.reason(self.config.train.stop_early)

    @property
    def early_end(self) -> str:
        """Why the run has ended before its last step; empty if it has not."""
        return self.early_stop if self.state.step < self.schedule.total_steps else ""

    @property
    def has_ended(self) -> bool:
        """Whether the run has taken its last step, or has stopped early."""
        return self.state.step >= self.schedule.total_steps or bool(self.early_stop)

    def close(self) -> None:
        """Close the sinks, unless they are closed, and the log."""
        if self.sinks:
            self.sinks.close()
        stop_logging(self.log)


def build(agreed: Agreed, world: World, check_lock: Callable[[], None], began_at: float) -> Parts:
    """Build every part of a run that does not depend on the training loop, and restore the checkpoint. Collective.

    Raises:
        UsageError: a part cannot be built as the config says, or does not fit the data.
        RunError: the run folder cannot be written, or the checkpoint is damaged.
    """
    checkpoint, data = agreed.checkpoint, agreed.data
    config = agreed.config if checkpoint is None else _without_init_from(agreed.config)
    with fail_together(world):
        check_precision(config, world)
        augment = build_augment(config)
    state, network = build_network(config, world, data.source, agreed.schedule, agreed.folder)
    with fail_together(world):
        if checkpoint is not None:
            with _mirror_named(config):
                state.restore(checkpoint)
            state.earlier = _model_before(checkpoint, agreed.plan)
    # After every rank has restored its part: if the checkpoint is damaged, or the config does not fit it, the folder
    # must remain unchanged.
    sinks, log = _begin_in_folder(agreed, state)
    return Parts(
        **vars(agreed),
        state=state,
        network=network,
        augment=augment,
        log=log,
        sinks=sinks,
        check_lock=check_lock,
        began_at=began_at,
    )


def _model_before(checkpoint: Checkpoint, plan: RunPlan) -> dict[str, Any]:
    """Return the description of the model before it was trained on the present data.

    It is not that of the model in the checkpoint if this has the same data: their cards may have been corrected.
    """
    # By the images, not by their paths: of data that was moved, each calibration would warn that it is missing at the
    # old one.
    has_same_data = all(
        plan.inputs[name] == checkpoint.meta.get(name, plan.inputs[name])  # older ones have fewer digests
        for name in ("dataset", "records", "samples", "object_versions")
    )
    found = checkpoint.meta.get("earlier" if has_same_data else "model")
    return found if isinstance(found, dict) else {}


@contextmanager
def _mirror_named(config: Config) -> Iterator[None]:
    """Say in the error of a damaged checkpoint how to take it from the mirror."""
    try:
        yield
    except DamagedCheckpointError as error:
        if not config.checkpoint.mirror:
            raise
        raise DamagedCheckpointError(
            f"{error}; or remove the folder of the damaged one: a resume then downloads it from "
            f"{public(config.checkpoint.mirror)}, if that has it"
        ) from error


def _begin_in_folder(agreed: Agreed, state: TrainState) -> tuple[Sinks | None, LogFile]:
    """Open the sinks of the run, write its folder and open its log; return sinks and log. Collective."""
    world, warnings = state.world, list[str]()
    sinks = None
    try:
        with fail_together(world):
            if world.is_leader:
                source, measured = agreed.data.source, agreed.plan.request.measured.keys()
                # A run that continues has `model.init_from` here, too: its network is not a new one.
                config = agreed.config
                raises_lr = any(
                    change.key == "optim.lr" and change.now > change.before for change in agreed.plan.changes
                )
                warnings += check_start(
                    config, agreed.folder, source, state, agreed.schedule, measured, raises_lr=raises_lr
                )
                # Before the folder is written: a sink may refuse the run.
                sinks = open_sinks(agreed.config, agreed.folder, agreed.plan.run_id, agreed.plan.step)
                warnings += sinks.faults if sinks else []
            if agreed.hosts.is_owner:
                warnings += _open_folder(agreed, state)
        # Not earlier: on the other hosts of a refused resume, the folder must remain unchanged too.
        write_collectives_to(agreed.folder)
        log = log_to(agreed.folder / log_of_host(world.rank - world.local_rank), world.rank)
    except BaseException:
        if sinks:
            sinks.close()
        raise
    for warning in warnings if world.is_leader else ():
        warn(warning)
    return sinks, log


def build_network(
    config: Config, world: World, source: FaceDataset, schedule: StepSchedule, folder: Path
) -> tuple[TrainState, nn.Module]:
    """Build the state of a run before its first step, and its network for training steps. Collective."""
    identities = read_identities(config, world, source.num_classes, source)
    # Each rank builds the whole backbone from the same seed, and its own part of the class centers. DDP sends the
    # backbone of rank 0 once more, which may differ in its last bits on a host with another processor.
    with fail_together(world):
        state = build_state(config, world, source.num_classes, schedule, folder, source, identities)
        # All labels now, on the host: on a GPU, the head does not check those of a step.
        state.head.check_labels(source.labels)
    # Apart from the block above: ranks exchange whether they can use the kernels, and all must take part.
    return state, network_for_steps(config, state, schedule)


def network_for_steps(config: Config, state: TrainState, schedule: StepSchedule) -> nn.Module:
    """Choose the kernels of the heads of a state; return its network for training steps. Collective."""
    world, largest = state.world, max(stage.local_batch_size for stage in schedule.stages)
    choose_kernels(state, largest * world.size, config.train.timeout_s)
    return wrap_in_ddp(
        state.network, world, config.train.compress_gradients, accumulate=config.optim.accumulate
    )


def _without_init_from(config: Config) -> Config:
    """Return the config of a run that continues: its checkpoint has all weights of the file `model.init_from`."""
    return config.model_copy(update={"model": config.model.model_copy(update={"init_from": None})})


def _open_folder(agreed: Agreed, state: TrainState) -> list[str]:
    """Write the files that describe the run to the folder of this disk; return what differs from before."""
    plan, folder, world, checkpoint = agreed.plan, agreed.folder, state.world, agreed.checkpoint
    environment = describe_environment(folder, world, plan.request.command_line, agreed.launchers)
    source = agreed.data.source
    environment |= {IDENTITIES: source.num_classes, IMAGES: source.num_images}
    environment["execution"] = state.describe_execution()
    environment["kernels"] = any(part.head.uses_kernels for part in head_parts(state.head))
    differences = list[str]()
    if checkpoint is not None:
        differences += environment_changes(recorded_environment(folder), environment)
        differences += _leave_later_checkpoints(agreed, checkpoint.step)
        differences += describe_batch_change(
            checkpoint, agreed.config, agreed.schedule, epoch_size(source), world.size
        )
        if world.is_leader and (mirror := agreed.mirror):
            # First: a process that still trains this run elsewhere must upload no more.
            mirror.claim(plan.run_id)
            mirror.leave_after(checkpoint.step)
        accepted = Accepted.of(checkpoint, plan.manifest, plan.changes, plan.inputs)
        environment[ACCEPTED] = accepted.model_dump(mode="json")
        differences += [
            f"{key}: the run continues after step {checkpoint.step} with other {words}"
            for key, words in changed_inputs(checkpoint, accepted.inputs).items()
        ]
    write_run_files(folder, plan.run_id, agreed.config, environment)
    return differences


def _leave_later_checkpoints(agreed: Agreed, step: int) -> list[str]:
    """Make the checkpoint of a step the newest of the run folder; return what that means for others."""
    folder, keep_parts = agreed.folder, None if agreed.plan.goes_back else agreed.config.checkpoint.keep
    with os_errors_as(RunError, folder):
        missing = missing_newest(folder)
        renamed = leave_after(folder, step, keep_parts=keep_parts)
    lines = [f"going back to step {step}: {missing}, the newest checkpoint, is missing"] if missing else []
    if renamed:
        names = ", ".join(renamed)
        lines.append(f"going back to step {step}: what is newer is kept as {names}")
    return lines
