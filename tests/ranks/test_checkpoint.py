import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from facetrain.checkpoint.load import Checkpoint, open_on_all_ranks
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.distributed import collectives
from facetrain.distributed.world import World
from facetrain.errors import RunError
from facetrain.head.class_shard import shard_classes
from facetrain.run.folder.create import create_run_folder
from tests.support.faults import files_limited_to
from tests.support.ranks import run_ranks
from tests.support.snapshots import snapshot


def save_twice(folder):
    """Save step 1, then step 2, at which the last rank cannot write its rows."""
    rank, world_size = collectives.rank(), collectives.world_size()
    writer = CheckpointWriter(folder, keep=1)
    writer.save(snapshot(1, rank=rank, world_size=world_size))
    first = writer.finish()
    with files_limited_to(100 if rank == world_size - 1 else 1 << 30):
        writer.save(snapshot(2, rank=rank, world_size=world_size))
        while (second := writer.poll()) is None:
            time.sleep(0.01)
    return first.failure, second.failure


@pytest.mark.parametrize("saved_on", [1, 2, 3, 4])
def test_rows_saved_on_some_ranks_load_on_any_number(tmp_path, saved_on):
    outcomes = run_ranks(saved_on, save_twice, tmp_path) if saved_on > 1 else [save_twice(tmp_path)]
    assert set(outcomes) == {outcomes[0]}, "all ranks must get the same outcome"
    first, second = outcomes[0]
    assert first == "" and f"rank {saved_on - 1}" in second and "File too large" in second
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.verify()
    assert checkpoint.step == 1 and checkpoint.manifest.world_size == saved_on
    for world_size in (1, 2, 3, 4):
        parts = []
        for rank in range(world_size):
            shard = shard_classes(11, rank, world_size)
            parts.append(checkpoint.rows("weight", shard.start, shard.stop))
        assert torch.cat(parts)[:, 0].tolist() == [float(c + 1) for c in range(11)]
    assert [checkpoint.rank_state(rank)["cpu"].item() for rank in range(saved_on)] == list(range(saved_on))


def open_where_machines_differ(folder):
    """Open `run` and `other` on two machines whose storage is not the same; return the steps, or the messages."""
    rank = collectives.rank()
    os.chdir(folder / f"machine{rank}")
    world = World(rank=rank, local_rank=0, size=2, local_size=1, device=torch.device("cpu"))
    found = []
    for path in (Path("run"), Path("other"), Path("none")):
        try:
            found.append(open_on_all_ranks(world, path).step)
        except RunError as error:
            found.append(str(error))
    claimed, again = create_run_folder(world, given=Path("seen_by_one"), default=Path("runs"))
    return [*found, str(claimed), again]


def test_all_ranks_open_the_checkpoint_and_use_the_run_folder_that_the_leader_finds(tmp_path):
    (tmp_path / "machine1" / "seen_by_one").mkdir(parents=True)
    writer = CheckpointWriter(tmp_path / "machine1" / "run", asynchronous=False)
    writer.save(snapshot(1))
    shutil.copytree(tmp_path / "machine1" / "run", tmp_path / "machine0" / "run")
    writer.save(snapshot(2))
    for machine in (0, 1):
        other = CheckpointWriter(tmp_path / f"machine{machine}" / "other", asynchronous=False)
        other.save(snapshot(1, meta={"note": machine}))
    CheckpointWriter(tmp_path / "machine1" / "seen_by_one" / "checkpoints", asynchronous=False).save(
        snapshot(1)
    )
    leader, second = run_ranks(2, open_where_machines_differ, tmp_path)
    assert leader[0] == second[0] == 1
    assert leader[1] == "rank 1 failed" and "not the checkpoint that rank 0 sees" in second[1]
    assert leader[2] == "none: contains no checkpoint" and second[2] == "rank 0 failed"
    assert leader[3:] == second[3:] == ["seen_by_one", False]
