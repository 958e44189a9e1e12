"""Training runs: `train` starts a new run, `resume` continues one.

Both lock the run folder, find the checkpoint, prepare the run (`prepare_run`), and train it (`train_prepared`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from facetrain.checkpoint.load import open_on_all_ranks
from facetrain.config.schema import Config
from facetrain.distributed import collectives
from facetrain.distributed.agreement import explain_failures
from facetrain.distributed.grace_period import grace_s
from facetrain.distributed.process_setup import fix_cublas_workspace
from facetrain.distributed.world import World, join
from facetrain.run.callbacks.live_report import LiveReport
from facetrain.run.choices import NO_CHOICES, Choices
from facetrain.run.folder.create import (
    create_run_folder,
    has_checkpoint,
    is_restart,
    launchers_of,
    prepare_checkpoints,
    remove_if_empty,
    was_restarted,
)
from facetrain.run.folder.hosts import continues_from_mirror, fetch_checkpoint, find_hosts
from facetrain.run.folder.lock import locked
from facetrain.run.folder.run_state import Start, train_recorded
from facetrain.run.prepare import PreparedRun, prepare_run
from facetrain.run.train_prepared import train_prepared
from facetrain.telemetry.log import stop_logging
from facetrain.training.deterministic import deterministic_algorithms


def train(
    config: Config,
    run_dir: Path | None = None,
    *,
    resume_existing: bool = False,
    profile: bool = False,
    set_keys: Set[str] = frozenset(),
    open_page: bool = False,
    choices: Choices = NO_CHOICES,
    on_folder: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Train a new run on this rank; return the exit code. Collective.

    If torch's elastic launcher has restarted the workers, the run continues from its newest checkpoint; so it does if
    another rank resumes it. `resume_existing` also continues the run of an earlier command, if there is one in the
    folder. `profile` records a few steps in the run folder. `open_page` shows the report in a browser. `set_keys` are
    the config keys that the command line sets. `choices` says what a new run chooses itself. `on_folder` is called with
    the folder of the run.
    """
    with _joined_world(config) as world:
        prepare = partial(prepare_run, config, world, set_keys=set_keys, choices=choices)
        default = Path(config.run.dir) / config.run.name
        if _some_rank_resumes(this_rank=False):
            return _resume(config, world, run_dir or default, None, prepare, profile=profile)
        # Before the folder is created, because a failure may remove only a new one.
        is_new = run_dir is None or not run_dir.exists()
        # With a mirror, the name is the same on all hosts, and in the mirror.
        given = run_dir or (default if config.checkpoint.mirror else None)
        folder, continues = create_run_folder(world, given=given, default=default, may_exist=resume_existing)
        on_folder(folder)
        try:
            # From here to the end no other process writes this run: checkpoints are cleaned up, chosen and written
            # under the lock.
            with locked(world, folder, launchers_of(world)) as lock:
                hosts = find_hosts(world, config, folder)
                if resume_existing:
                    # With the lock: until then, a command that is ending may save the first checkpoint.
                    continues = collectives.any_rank(has_checkpoint(folder))
                if hosts.mirror:
                    restarted = continues or was_restarted(folder, world, launchers_of(world))
                    continues = continues_from_mirror(
                        world, hosts, folder, was_restarted=restarted, resume=resume_existing
                    )
                prepare_checkpoints(world, folder, is_new_run=not continues, is_owner=hosts.is_owner)
                step = fetch_checkpoint(world, hosts, folder, None) if continues else None
                checkpoint = open_on_all_ranks(world, folder, step) if continues else None
                return _run(prepare(folder, checkpoint, lock, hosts), profile=profile, open_page=open_page)
        finally:
            if is_new:
                remove_if_empty(folder, world)


def resume(
    config: Config,
    run_dir: Path,
    step: int | None = None,
    *,
    profile: bool = False,
    set_keys: Set[str] = frozenset(),
) -> int:
    """Continue a run from the checkpoint of a step, by default the newest; return the exit code. Collective.

    The other options are as in `train`.
    """
    with _joined_world(config) as world:
        # The answer is known here; ranks that began with `train` wait for it.
        _some_rank_resumes(this_rank=True)
        prepare = partial(prepare_run, config, world, set_keys=set_keys)
        return _resume(config, world, run_dir, step, prepare, profile=profile)


def _some_rank_resumes(*, this_rank: bool) -> bool:
    """Return whether a rank was started by `resume`. Collective: `train` and `resume` both begin with it.

    A host that replaces a lost one may have begun with `facetrain resume`, while the others run `facetrain train`.
    """
    return collectives.any_rank(this_rank)


def _resume(
    config: Config,
    world: World,
    run_dir: Path,
    step: int | None,
    prepare: Callable[..., PreparedRun],
    *,
    profile: bool,
) -> int:
    """Continue a run from the checkpoint of a step on the ranks of a world; return the exit code. Collective.

    `prepare` is `prepare_run` with its config, world and options.
    """
    with locked(world, run_dir, launchers_of(world)) as lock:
        hosts = find_hosts(world, config, run_dir)
        # Before a checkpoint is chosen: a save that a kill has interrupted between two renames is completed first.
        prepare_checkpoints(world, run_dir, is_new_run=False, is_owner=hosts.is_owner)
        # After a restart, the run has newer checkpoints than the one that the command line asks for.
        requested = None if is_restart(run_dir, world) else step
        requested = fetch_checkpoint(world, hosts, run_dir, requested)
        checkpoint = open_on_all_ranks(world, run_dir, requested)
        return _run(prepare(run_dir, checkpoint, lock, hosts), profile=profile)


@contextmanager
def _joined_world(config: Config) -> Iterator[World]:
    """Join the process group for the duration of the context."""
    grace_s()  # a wrong environment variable must be refused before there is a run folder
    timeout_s = config.train.timeout_s
    deterministic = config.train.deterministic
    if deterministic:
        fix_cublas_workspace()  # cuBLAS reads the variable when CUDA starts, which joining does
    joining = join(
        config.train.device,
        timeout_s=timeout_s,
        keep_freed=config.train.keep_freed_memory,
        cpu_setting="train.device: cpu",
    )
    with (
        joining as world,
        explain_failures(world, timeout_s),
        deterministic_algorithms(deterministic),
    ):
        yield world


def _run(run: PreparedRun, *, profile: bool, open_page: bool = False) -> int:
    """Train a prepared run, with its state in the run folder; return the exit code."""
    is_leader = run.world.is_leader
    page = LiveReport(run.folder, open_page) if is_leader and run.config.log.report else None
    train_it = partial(train_prepared, run, profile=profile, page=page)
    try:
        # One file for all ranks: `facetrain runs` reads it, and only the leader writes it.
        if not is_leader:
            return train_it()
        start = Start(step=run.state.step, ranks=run.world.size, device=run.world.device.type)
        return train_recorded(
            run.folder,
            start,
            run.schedule.total_steps,
            train_it,
            lambda: run.state.early_stop.reason(run.config.train.stop_early),
        )
    finally:
        if page:
            page.write()
        stop_logging(run.log)
