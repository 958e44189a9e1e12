"""One checkpoint for all ranks, whatever each machine sees of the storage at the moment.

NFS may list a folder as it was a minute ago, and machines that share no storage have folders of their own: ranks
that each opened the newest checkpoint in sight would go on from different steps.
"""

from __future__ import annotations

from pathlib import Path

from facetrain.checkpoint.load import Checkpoint
from facetrain.distributed.agreement import decided_by_leader, one_voice
from facetrain.distributed.world import World
from facetrain.errors import CheckpointError


def open_together(world: World, path: Path, step: int | None = None) -> Checkpoint:
    """Open on every rank the checkpoint that the leader finds, as `Checkpoint.open` does. Collective.

    Raises:
        CheckpointError: there is none, or another machine sees none or another one in its place.
    """

    def newest() -> list[str]:
        found = Checkpoint.open(path, step)
        return [str(found.folder), found.manifest.dump()]

    folder, content = decided_by_leader(world, newest)
    with one_voice(world):
        checkpoint = Checkpoint(Path(folder))
        if checkpoint.manifest.dump() != content:
            raise CheckpointError(
                f"rank {world.rank}: {folder}: is another checkpoint here than rank 0 has there; "
                "all machines of a run need one folder that they share"
            )
    return checkpoint
