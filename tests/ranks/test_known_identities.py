"""Class centers of known people, on several ranks."""

from dataclasses import replace

from facetrain.checkpoint.save import CheckpointWriter
from facetrain.config.loading import build_config
from facetrain.distributed import collectives
from facetrain.models.known_identities import Names
from facetrain.run.parts.state import read_identities
from tests.support.ranks import run_ranks
from tests.support.snapshots import snapshot
from tests.support.world import ONE_RANK


class NamedOnTheLeader:
    """A dataset whose names only rank 0 may read."""

    def identity_names(self):
        assert collectives.rank() == 0
        return iter(("anna", "bob", "cleo"))


def read(old):
    values = {"data": {"train": "x"}, "model": {"init_from": str(old)}, "head": {"init_from": "extend"}}
    config = build_config(values, "test")
    world = replace(ONE_RANK, rank=collectives.rank(), size=collectives.world_size())
    found = read_identities(config, world, 3, NamedOnTheLeader())
    names = found.names.text.decode() if found.names else ""
    return [names, found.centers.number.tolist(), found.centers.remark]


def test_the_leader_alone_reads_the_names_and_chooses_the_centers_of_all_ranks(tmp_path):
    writer = CheckpointWriter(tmp_path / "checkpoints")
    tensors = {
        f"identities.{name}": value for name, value in Names.of(["bob", "dora", "cleo"]).tensors().items()
    }
    writer.save(snapshot(0, num_classes=3, replicated=tensors))
    assert not writer.finish().failure
    leader, other = run_ranks(2, read, tmp_path)
    assert leader[0] == "anna\nbob\ncleo\n" and leader[2].startswith("class centers by name")
    assert other == ["", leader[1], ""] and leader[1] == [-1, 0, 2]
