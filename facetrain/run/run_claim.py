"""Claim of a run by the leader: its folder, found or created and locked, and what the command asks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from facetrain.config.schema import Config
from facetrain.distributed.ranks import Ranks
from facetrain.run.asked_config import AskedConfig, asked_config, recorded_config
from facetrain.run.folder.claim import FolderClaim, has_checkpoints
from facetrain.run.folder.earlier import clean_up
from facetrain.run.folder.environment import software_of_host
from facetrain.run.folder.lease import Lease
from facetrain.run.request import TrainRequest


class Claim(BaseModel, frozen=True, ser_json_inf_nan="constants"):
    """Place and command of a run: all hosts compare them before anything else is read."""

    terms: dict[str, Any]
    """What the command of the leader asks beside its config."""
    folder: str
    token: str
    """Token of the leader's lock: a host that sees it shares the folder."""
    given: dict[str, Any]
    """Values of the config, as the command gives them."""
    versions: dict[str, str]
    """Versions of the packages on which the numbers of a run depend, if it has several hosts."""
    goes_on: bool
    """Whether this job has trained the run before, and was started again."""
    has_trained: bool
    """Whether this job or an earlier one has trained the run before: its data could be read then."""
    mirror: str | None
    """Address in which hosts that share no folder keep the run."""


def claim_run(
    request: TrainRequest, ranks: Ranks, launchers: Sequence[str], lease: Lease
) -> tuple[Claim, AskedConfig]:
    """Find or create the folder of the run and lock it; return the claim and the config. For the leader only.

    Raises:
        UsageError: the request cannot be met: the config, the folder, another process that writes the run.
        RunError: the folder cannot be written to.
    """
    folders = FolderClaim(launchers, lease)
    if request.command == "resume":
        folder, asked = recorded_config(request)
        folders.continued(folder)
    else:
        asked = asked_config(request)
        folder = _folder_of_new_run(request, asked.config, folders, lease)
    lease.lock(folder, launchers)
    # Before a checkpoint is chosen: a save that a kill has interrupted between two renames is completed first.
    clean_up(folder)
    goes_on = folders.was_used(folder)
    claim = Claim(
        terms=request.terms,
        folder=str(folder),
        token=lease.token,
        given=asked.given,
        versions=software_of_host() if ranks.spans_hosts else {},
        goes_on=goes_on,
        has_trained=goes_on or has_checkpoints(folder),
        mirror=asked.config.checkpoint.mirror,
    )
    return claim, asked


def _folder_of_new_run(request: TrainRequest, config: Config, folders: FolderClaim, lease: Lease) -> Path:
    if lease.folder:  # the request was changed by what was measured for this run
        return lease.folder
    default = Path(config.run.dir) / config.run.name
    # With a mirror, the name is the same on all hosts, and in the mirror.
    if request.run_dir or request.resume_existing or config.checkpoint.mirror:
        return folders.named(Path(request.run_dir or default), may_exist=request.resume_existing)
    return folders.numbered(default)
