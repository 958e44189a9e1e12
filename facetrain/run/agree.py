"""Agreement on a run: the leader's plan goes to all ranks, and every host compares with it what it has itself.

Nothing else is exchanged before the parts of the run are built. Ranks that do not agree end together, before the run
folder has anything of the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from facetrain.checkpoint.commit import CHECKPOINTS
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.mirror import Mirror
from facetrain.config.loading import CONFIG_FILE
from facetrain.config.own_code import allow_code_of, own_places, require_code_allowed
from facetrain.config.paths import with_absolute_paths
from facetrain.config.schema import Config
from facetrain.data.loading.sampler import epoch_size
from facetrain.distributed.ranks import Ranks
from facetrain.errors import DataError, UsageError
from facetrain.remote.address import is_remote
from facetrain.remote.download import pinned
from facetrain.run.asked_config import AskedConfig, asked_config
from facetrain.run.folder.claim import FolderClaim, existing_run, has_checkpoints, require_replaceable
from facetrain.run.folder.compatibility import differences
from facetrain.run.folder.data_digests import describe_difference, digest_inputs, digest_weights
from facetrain.run.folder.earlier import clean_up, leave_after
from facetrain.run.folder.environment import software_of_host
from facetrain.run.folder.hosts import Hosts, owns_folder
from facetrain.run.folder.lease import Lease
from facetrain.run.parts.open_data import RunData, open_data
from facetrain.run.parts.step_schedule import StepSchedule, schedule_steps
from facetrain.run.request import FOLDER_TERM, TrainRequest
from facetrain.run.resolve import Claim, claim_run, digest_text, open_mirror, resolve
from facetrain.run.run_plan import RunPlan
from facetrain.telemetry.log import warn


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


def agree(ranks: Ranks, request: TrainRequest, lease: Lease, pin: Callable[[str], str] = pinned) -> Agreed:
    """Let the leader resolve a request, and compare its plan on all hosts. All ranks call it together.

    Raises:
        UsageError: the request cannot be met; or a host has another config, other data, another checkpoint, or other
            versions of packages.
        RunError: a file cannot be read or written.
    """
    launchers = sorted({name for name in ranks.gather(ranks.launcher_id) if name})
    asked: AskedConfig | None = None  # of the leader only
    data: RunData | None = None

    def decide_where() -> dict[str, Any]:
        nonlocal asked
        claim, asked = claim_run(request, ranks, launchers, lease)
        return claim.model_dump()

    claim = Claim.model_validate(ranks.decide(decide_where))
    ranks.goes_on, ranks.has_trained = claim.goes_on, claim.has_trained
    hosts, restarted = _compare_commands(ranks, request, claim, launchers, lease)

    def decide_what() -> dict[str, Any]:
        nonlocal data
        assert asked is not None
        with ranks.outages(DataError):
            plan, data = resolve(request, claim, asked, ranks, hosts, restarted=restarted, pin=pin)
        return plan.model_dump(mode="json", by_alias=True)

    plan = RunPlan.model_validate(ranks.decide(decide_what))
    config = with_absolute_paths(plan.config)
    with ranks.failing_together():
        # The user of each host has given the config, or has allowed the code in it.
        if request.command == "train" or request.allow_code:
            allow_code_of(plan.config)
        require_code_allowed(plan.config, f"{plan.folder}/{CONFIG_FILE}")
        with ranks.outages(DataError):
            data = data or _compare_data(ranks, plan, config)
    with ranks.failing_together():
        _bring_disk_to(plan, config, ranks, hosts)
    checkpoint = None
    with ranks.failing_together():
        if plan.step is not None:
            checkpoint = _open_checkpoint(plan, plan.step)
    schedule = schedule_steps(config, epoch_size(data.source), ranks.size)
    return Agreed(plan, config, data, hosts, checkpoint, schedule, tuple(launchers))


def _compare_commands(
    ranks: Ranks, request: TrainRequest, claim: Claim, launchers: Sequence[str], lease: Lease
) -> tuple[Hosts, bool]:
    """Compare versions and configs of all hosts; return their disks, and whether one has checkpoints of this job."""
    folder = Path(claim.folder)
    with ranks.failing_together():
        if ranks.speaks_for_host and not ranks.is_leader:
            _compare_versions(ranks, claim.versions)
            # Of a run that continues, only its folder has the config, which another host need not have yet.
            if request.command == claim.terms["command"] == "train":
                _compare_configs(ranks, request, claim.given)
            _compare_terms(ranks, request.terms, claim.terms)
    folders = FolderClaim(launchers, ranks.restarts, lease)
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
    reports = ranks.gather([owns, restarted])
    owners = sum(each for each, _ in reports)
    return Hosts(owns, are_separate=owners > 1), any(each for _, each in reports)


def _compare_versions(ranks: Ranks, expected: dict[str, str]) -> None:
    own = software_of_host()
    for name in sorted({*own, *expected}):
        if own.get(name) != expected.get(name):
            raise UsageError(
                f"{name} is {own.get(name, 'missing')}, and rank 0 on {ranks.place(0)} has "
                f"{expected.get(name, 'none')}; install the same versions on all hosts"
            )


def _compare_configs(ranks: Ranks, request: TrainRequest, expected: dict[str, Any]) -> None:
    where = request.config if isinstance(request.config, str) else "the config"
    _require_equal(ranks, where, expected, asked_config(request).given)


def _compare_terms(ranks: Ranks, own: dict[str, Any], expected: dict[str, Any]) -> None:
    if own["command"] != expected["command"]:  # their options differ with it
        own, expected = ({"command": terms["command"]} for terms in (own, expected))
    # Both as this host understands them: one may have given the folder by its absolute path.
    _require_equal(ranks, "the command line", _with_place(expected), _with_place(own), absent="absent")


def _with_place(terms: dict[str, Any]) -> dict[str, Any]:
    """Return the terms with the absolute path of the run folder, without links, if they name one."""
    folder = terms.get(FOLDER_TERM)
    if not folder:
        return terms
    return terms | {FOLDER_TERM: folder.rstrip("/") if is_remote(folder) else os.path.realpath(folder)}


def _require_equal(
    ranks: Ranks, where: str, expected: dict[str, Any], own: dict[str, Any], *, absent: str = "null"
) -> None:
    def text(value: Any) -> str:
        return absent if value is None else json.dumps(value)

    changes = ", ".join(
        f"{each.key} is {text(each.now)}, not {text(each.before)}" for each in differences(expected, own)
    )
    if changes:
        raise UsageError(
            f"{where}: {changes} as for rank 0 on {ranks.place(0)}; give the same config and options on all hosts"
        )


def _compare_data(ranks: Ranks, plan: RunPlan, config: Config) -> RunData:
    """Open on this rank what the run reads, and compare it with what the leader has."""
    data = open_data(config)
    if not ranks.speaks_for_host:  # the first rank of its host reads the same files
        return data
    own = digest_inputs(config, data.source, data.sets)
    places_by_input = {"sets": {each.name: str(each.path) for each in data.sets}, "code": own_places(config)}
    for name, expected in plan.inputs.items():
        if own[name] == expected:
            continue
        key, words = describe_difference(name, expected, own[name])
        place = str(_value(config, key))
        if places := places_by_input.get(name):
            place = ", ".join(places[each] for each in own[name] if own[name][each] != expected.get(each))
        raise UsageError(
            f"{place} ({key}): other {words} than rank 0 on {ranks.place(0)} has; copy them to all hosts"
        )
    for key, digest in digest_weights(config).items() if plan.weights else ():
        if digest != plan.weights.get(key):
            raise UsageError(
                f"{_value(config, key)} ({key}): another file than rank 0 on {ranks.place(0)} has; copy the same to "
                "all hosts"
            )
    return data


def _bring_disk_to(plan: RunPlan, config: Config, ranks: Ranks, hosts: Hosts) -> None:
    """Bring the run folder of this rank's disk to the state from which the run begins; the first write of the run.

    Raises:
        UsageError: a new run is to begin in a folder that has checkpoints, or other files that it must not replace.
        CheckpointError: the checkpoint cannot be downloaded.
    """
    folder = Path(plan.folder)
    mirror = open_mirror(config, folder)
    if not hosts.is_owner:
        return
    if not ranks.is_leader:
        clean_up(folder)
    if plan.step is None and has_checkpoints(folder):
        if not plan.restarted:
            raise existing_run(folder)
        left = ", ".join(leave_after(folder, -1))
        warn(
            f"{config.checkpoint.mirror}: has no checkpoint of this run, and no host has all files of one: it begins "
            f"again at step 0; the parts on this host are kept in {folder / CHECKPOINTS} as {left}"
        )
    elif plan.step is None:
        require_replaceable(folder)
    if plan.is_fetched and plan.step is not None and mirror:
        mirror.fetch(plan.step, folder / CHECKPOINTS)
        if ranks.is_leader:
            mirror.fetch_files(folder)


def _open_checkpoint(plan: RunPlan, step: int) -> Checkpoint:
    # Each rank reads the manifest itself: that shows whether it sees the same files.
    checkpoint = Checkpoint.open(Path(plan.folder), step)
    if digest_text(checkpoint.manifest.dump()) != plan.manifest:
        raise UsageError(
            f"{checkpoint.folder}: not the checkpoint that rank 0 sees under this path; use a folder that all hosts of "
            "the run share"
        )
    return checkpoint


def _value(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)
