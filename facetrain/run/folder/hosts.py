"""Run folder of hosts that share it, and of hosts with separate disks, whose checkpoints meet in the mirror.

With separate disks the folder of each host holds the files of its own ranks, which is no complete checkpoint. A
checkpoint is complete when its manifest is in the mirror, and a resume downloads what a host lacks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from facetrain.checkpoint.commit import CHECKPOINTS, complete_steps, step_folder
from facetrain.checkpoint.manifest import read_manifest
from facetrain.distributed.ranks import Ranks
from facetrain.errors import CheckpointError
from facetrain.run.folder.lock_file import has_lock, refresh

_NEWS_S = 60.0
"""Seconds within which all hosts that share a folder see a new file there, whatever their file system keeps."""


@dataclass(frozen=True)
class Hosts:
    """Disks of the hosts of a run, as this rank sees them."""

    is_owner: bool = True
    """Whether this rank writes the run folder of its disk: the leader, and the first rank of each host that does not
    share the leader's folder."""
    are_separate: bool = False
    """Whether some host does not share the leader's folder."""


def owns_folder(ranks: Ranks, folder: Path, token: str, *, has_mirror: bool) -> bool:
    """Return whether this rank writes the run folder of its disk. `token` is that of the leader's lock.

    Raises:
        RunError: the folder cannot be read.
    """
    if ranks.is_leader or not (ranks.speaks_for_host and ranks.spans_hosts):
        return ranks.is_leader
    if has_lock(folder, token):
        return False
    refresh(folder)
    # Without a mirror, the run ends if this host does not see the lock in the folder that it has.
    is_patient = not has_mirror and os.path.exists(folder)
    return not has_lock(folder, token, within_s=_NEWS_S if is_patient else 0.0)


def whole_steps(hosts: Hosts, folder: Path) -> list[int]:
    """Return the steps whose checkpoints have all their files in the leader's folder.

    After the loss of all other hosts, the folder of the last one is no longer separate, but was. What counts as whole
    without a readable manifest is reported as damaged.
    """
    steps = [] if hosts.are_separate else complete_steps(folder / CHECKPOINTS)
    return [step for step in steps if is_whole(step_folder(folder / CHECKPOINTS, step))]


def is_whole(folder: Path) -> bool:
    """Return whether a checkpoint has all its files on this disk; one without a readable manifest counts as whole."""
    try:
        return all((folder / entry.name).exists() for entry in read_manifest(folder).files)
    except CheckpointError:
        return True
