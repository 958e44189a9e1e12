"""Run folder of hosts that share it, and of hosts with separate disks, whose checkpoints meet in the mirror.

With separate disks the folder of each host holds the files of its own ranks, which is no complete checkpoint. A
checkpoint is complete when its manifest is in the mirror, and a resume downloads what a host lacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from facetrain.checkpoint.commit import CHECKPOINTS, complete_steps, step_folder
from facetrain.checkpoint.manifest import read_manifest
from facetrain.checkpoint.mirror import Mirror
from facetrain.config.schema import Config
from facetrain.distributed import collectives
from facetrain.distributed.agreement import decide_on_leader, fail_together
from facetrain.distributed.world import World
from facetrain.errors import CheckpointError, NoCheckpointError, RunError, UsageError
from facetrain.files import make_folder, os_errors_as, scratch_path
from facetrain.remote.filesystem import public
from facetrain.run.folder.create import rename_later_checkpoints

_POLL_S = 0.2


@dataclass(frozen=True)
class Hosts:
    """Disks of the hosts of a run, as this rank sees them."""

    is_owner: bool
    """Whether this rank writes the run folder of its disk: the leader, and the first rank of each host that does not
    share the leader's folder."""
    are_separate: bool
    """Whether some host does not share the leader's folder."""
    mirror: Mirror | None
    """Mirror of the run."""


def find_hosts(world: World, config: Config, folder: Path) -> Hosts:
    """Find out whether the hosts share the run folder, and open the mirror. Collective.

    Raises:
        UsageError: they do not, and there is no mirror; or the mirror cannot be used.
    """
    url = config.checkpoint.mirror
    with fail_together(world):
        mirror = Mirror(f"{url}/{folder.absolute().name}") if url else None
    if world.size == world.local_size:
        return Hosts(world.is_leader, False, mirror)

    def create() -> str:
        with os_errors_as(RunError, folder):
            probe = scratch_path(folder / "shared")
            probe.touch()
        return probe.name

    name = decide_on_leader(world, create)
    with fail_together(world), os_errors_as(RunError, folder):
        # A request to the server: what a network file system has cached about the folder may be old.
        make_folder(folder)
    is_shared = (folder / name).exists()
    owners = collectives.gather_json(world.is_leader or (not is_shared and world.local_rank == 0))
    if world.is_leader:
        (folder / name).unlink(missing_ok=True)
    are_separate = sum(owners) > 1
    if are_separate and mirror is None:
        with fail_together(world):
            if not is_shared and owners[world.rank]:
                raise UsageError(
                    f"rank {world.rank}: {folder}: this host does not share the run folder with the host of rank 0; "
                    "use a folder that all hosts share, or set checkpoint.mirror to an address in an object store"
                )
    return Hosts(owners[world.rank], are_separate, mirror)


def continues_from_mirror(
    world: World, hosts: Hosts, folder: Path, *, was_restarted: bool, resume: bool
) -> bool:
    """Return whether a run with a mirror continues. Collective.

    Args:
        world: the ranks of the run.
        hosts: their disks.
        folder: run folder.
        was_restarted: whether the launcher of this rank has restarted it, and the folder has checkpoints.
        resume: whether the run is to continue if there is a checkpoint.
    """
    mirror = hosts.mirror
    assert mirror is not None
    if not (collectives.any_rank(was_restarted) or resume):
        return False
    if decide_on_leader(world, lambda: bool(mirror.steps() or _whole_steps(hosts, folder))):
        return True
    with fail_together(world):
        if hosts.is_owner:
            # No host has all files of these.
            rename_later_checkpoints(folder, -1)
    return False


def fetch_checkpoint(world: World, hosts: Hosts, folder: Path, choice: int | None) -> int | None:
    """Download what the disks lack of the checkpoint to continue from; return the choice among the local ones then.

    From hosts that share the folder, the newest checkpoint of folder and mirror is taken. Collective.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be downloaded.
    """
    mirror = hosts.mirror
    if mirror is None:
        return choice

    def choose() -> tuple[int, bool]:
        stored = mirror.steps()
        local = _whole_steps(hosts, folder)
        step = choice if choice is not None else max([*stored, *local], default=None)
        if step not in {*stored, *local}:
            missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise NoCheckpointError(f"{public(mirror.url)}: {missing}")
        return step, step not in local

    step, is_missing = decide_on_leader(world, choose)
    if not is_missing:
        return step

    def fetch() -> None:
        if hosts.is_owner:
            mirror.fetch(step, folder / CHECKPOINTS)
        if world.is_leader:
            mirror.fetch_files(folder)

    _run_together(world, fetch)
    return step


def _whole_steps(hosts: Hosts, folder: Path) -> list[int]:
    """Return the steps whose checkpoints have all their files in the leader's folder.

    After the loss of all other hosts, the folder of the last one is no longer separate, but was. A checkpoint without a
    readable manifest counts, so that it is reported as damaged.
    """
    steps = [] if hosts.are_separate else complete_steps(folder / CHECKPOINTS)
    return [step for step in steps if _is_whole(step_folder(folder / CHECKPOINTS, step))]


def _is_whole(folder: Path) -> bool:
    try:
        return all((folder / entry.name).exists() for entry in read_manifest(folder).files)
    except CheckpointError:
        return True


def _run_together(world: World, work: Callable[[], None]) -> None:
    """Run the work of each rank to its end; it may take longer than a collective may. Collective."""
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(work)
        while collectives.any_rank(not done.done()):
            time.sleep(_POLL_S)
        with fail_together(world):
            done.result()
