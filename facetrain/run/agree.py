"""Agreement on a run: the leader's plan goes to all ranks, and every host compares with it what it has itself.

Nothing else is exchanged before the parts of the run are built. Ranks that do not agree end together, before the run
folder has anything of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from facetrain.checkpoint.commit import CHECKPOINTS, point_latest, put_aside, step_folder
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.mirror import Mirror
from facetrain.checkpoint.run_id import read_run_id
from facetrain.config.loading import CONFIG_FILE
from facetrain.config.own_code import allow_code_of, require_code_allowed
from facetrain.config.paths import with_absolute_paths
from facetrain.config.schema import Config
from facetrain.data.loading.sampler import epoch_size
from facetrain.distributed.ranks import Ranks
from facetrain.errors import DataError, RunError, UsageError
from facetrain.files import os_errors_as
from facetrain.run.asked_config import open_mirror
from facetrain.run.compare_hosts import compare_commands, open_same_data
from facetrain.run.folder.claim import FolderClaim, existing_run, has_checkpoints, require_replaceable
from facetrain.run.folder.earlier import clean_up, leave_after
from facetrain.run.folder.hosts import Hosts, owns_folder
from facetrain.run.folder.lease import Lease
from facetrain.run.parts.open_data import RunData
from facetrain.run.parts.step_schedule import StepSchedule, schedule_steps
from facetrain.run.request import TrainRequest
from facetrain.run.resolve import resolve
from facetrain.run.run_claim import Claim, claim_run
from facetrain.run.run_plan import RunPlan
from facetrain.telemetry.log import warn

_Decision = TypeVar("_Decision", bound=BaseModel)
_Own = TypeVar("_Own")


@dataclass(frozen=True)
class Agreed:
    """Plan of a run, and what this rank has of it: equal to what the leader has."""

    plan: RunPlan
    config: Config
    """Config of the plan, with the absolute paths of this host."""
    data: RunData
    hosts: Hosts
    checkpoint: Checkpoint | None
    schedule: StepSchedule
    launchers: tuple[str, ...]
    """Elastic agents of the job: each of them may start its ranks again, also without the others."""

    @property
    def folder(self) -> Path:
        """Run folder."""
        return Path(self.plan.folder)

    @property
    def mirror(self) -> Mirror | None:
        """Copy of the run in an object store, if there is one."""
        return open_mirror(self.config, self.folder)


def agree(ranks: Ranks, request: TrainRequest, lease: Lease, pin: Callable[[str], str]) -> Agreed:
    """Let the leader resolve a request, and compare its plan on all hosts. All ranks call it together.

    Raises:
        UsageError: the request cannot be met; or a host has another config, other data, another checkpoint, or other
            versions of packages.
        RunError: a file cannot be read or written.
    """
    launchers = sorted({name for name in ranks.gather(ranks.launcher_id) if name})
    claim, asked = _decide(ranks, Claim, lambda: claim_run(request, ranks, launchers, lease))
    ranks.goes_on, ranks.has_trained = claim.goes_on, claim.has_trained
    with ranks.failing_together():
        compare_commands(ranks, request, claim)
    hosts, restarted = _claim_folders(ranks, request, claim, launchers, lease)

    def resolve_request() -> tuple[RunPlan, RunData]:
        assert asked is not None, "the leader has read its config"
        with ranks.outages(DataError):
            return resolve(request, claim, asked, ranks, hosts, restarted=restarted, pin=pin)

    plan, data = _decide(ranks, RunPlan, resolve_request)
    ranks.has_trained |= plan.resumes
    config = with_absolute_paths(plan.config)
    with ranks.failing_together():
        # The user of each host has given the config, or has allowed the code in it.
        if request.command == "train" or request.allow_code:
            allow_code_of(plan.config)
        require_code_allowed(plan.config, f"{plan.folder}/{CONFIG_FILE}")
        with ranks.outages(DataError):
            data = data or open_same_data(ranks, plan, config)
    with ranks.failing_together():
        _bring_disk_to(plan, config, ranks, hosts)
    checkpoint = None
    with ranks.failing_together():
        if plan.step is not None:
            checkpoint = _open_checkpoint(plan, plan.step)
    schedule = schedule_steps(config, epoch_size(data.source), ranks.size)
    return Agreed(plan, config, data, hosts, checkpoint, schedule, tuple(launchers))


def _decide(
    ranks: Ranks, kind: type[_Decision], decide: Callable[[], tuple[_Decision, _Own]]
) -> tuple[_Decision, _Own | None]:
    """Return the decision of the leader on all ranks, and what comes with it on the leader alone."""
    own: _Own | None = None

    def decide_as_json() -> dict[str, Any]:
        nonlocal own
        decision, own = decide()
        return decision.model_dump(mode="json", by_alias=True)

    return kind.model_validate(ranks.decide(decide_as_json)), own


def _claim_folders(
    ranks: Ranks, request: TrainRequest, claim: Claim, launchers: Sequence[str], lease: Lease
) -> tuple[Hosts, bool]:
    """Claim the run folder on each disk; return the disks, and whether one has checkpoints of this job."""
    folder = Path(claim.folder)
    folders = FolderClaim(launchers, lease)
    with ranks.failing_together():
        owns = owns_folder(ranks, folder, claim.token, has_mirror=claim.mirror is not None)
        if owns and not ranks.is_leader:
            if not claim.mirror:
                raise UsageError(
                    f"{folder}: this host does not share the run folder with the host of rank 0; use a folder that all "
                    "hosts share, or set checkpoint.mirror to an address in an object store"
                )
            if request.command == "resume":
                folders.continued(folder)
            else:
                folders.named(folder, may_exist=True)
    restarted = owns and folders.is_restart(folder)
    owners, restarts = zip(*ranks.gather([owns, restarted]), strict=True)
    return Hosts(owns, are_separate=sum(owners) > 1), any(restarts)


def _bring_disk_to(plan: RunPlan, config: Config, ranks: Ranks, hosts: Hosts) -> None:
    """Bring the run folder of this rank's disk to the state from which the run begins; the first write of the run.

    Raises:
        UsageError: a new run is to begin in a folder that has checkpoints, or other files that it must not replace; or
            a run is to continue where this disk has another one.
        CheckpointError: the checkpoint cannot be downloaded, or the id of the run cannot be read.
    """
    folder = Path(plan.folder)
    mirror = open_mirror(config, folder)
    if not hosts.is_owner:
        return
    if not ranks.is_leader:
        if plan.resumes and (run_id := read_run_id(folder)) not in (None, plan.run_id):
            raise UsageError(
                f"{folder}: is another run (id {run_id}) than on the host of rank 0 (id {plan.run_id}); rename or "
                "remove it on this host"
            )
        clean_up(folder)
    if plan.step is None and has_checkpoints(folder):
        if not plan.restarted:
            raise existing_run(folder)
        left = ", ".join(leave_after(folder, -1, keep_parts=config.checkpoint.keep))
        warn(
            f"{config.checkpoint.mirror}: has no checkpoint of this run, and no host has all files of one: it begins "
            f"again at step 0; the newest parts on this host are kept in {folder / CHECKPOINTS} as {left}"
        )
    elif plan.step is None:
        require_replaceable(folder)
    if ranks.is_leader and plan.left_steps:
        _leave_steps(plan.left_steps, folder / CHECKPOINTS)
    if plan.is_fetched and plan.step is not None and mirror:
        mirror.fetch(plan.step, folder / CHECKPOINTS, records_to=folder if ranks.is_leader else None)


def _leave_steps(steps: Sequence[int], checkpoints: Path) -> None:
    with os_errors_as(RunError, checkpoints):
        names = [put_aside(step_folder(checkpoints, step)).name for step in steps]
        point_latest(checkpoints)
    warn(
        f"the run has gone back on another disk: the checkpoints here that it has left are kept as {', '.join(names)}"
    )


def _open_checkpoint(plan: RunPlan, step: int) -> Checkpoint:
    # Each rank reads the manifest itself: that shows whether it sees the same files.
    checkpoint = Checkpoint.open(Path(plan.folder), step)
    if checkpoint.manifest.digest != plan.manifest:
        raise UsageError(
            f"{checkpoint.folder}: not the checkpoint that rank 0 sees under this path; use a folder that all hosts of "
            "the run share"
        )
    return checkpoint
