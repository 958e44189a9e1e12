from unittest.mock import patch

import pytest
import torch

from facetrain.checkpoint import commit
from facetrain.checkpoint.commit import complete_steps
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.distributed import collectives
from facetrain.head.class_shard import shard_classes
from tests.support.faults import files_limited_to
from tests.support.ranks import run_ranks
from tests.support.snapshots import snapshot
from tests.support.waiting import wait_until


def save_twice(folder):
    """Save step 1, then step 2, of which the last rank cannot write its rows, then step 3, which gets no name."""
    rank, world_size = collectives.rank(), collectives.world_size()
    writer = CheckpointWriter(folder, keep=1)
    writer.save(snapshot(1, rank=rank, world_size=world_size))
    first = writer.finish()
    with files_limited_to(100 if rank == world_size - 1 else 1 << 30):
        writer.save(snapshot(2, rank=rank, world_size=world_size))
        second = wait_until(writer.poll)
    # A checkpoint of the step is replaced, and what an earlier replacement has left is in the way.
    (folder / "step_00000003").mkdir(exist_ok=True)
    (folder / ".step_00000003.replaced" / "rest").mkdir(parents=True, exist_ok=True)
    writer.save(snapshot(3, rank=rank, world_size=world_size))
    third = writer.finish()
    if rank == 0:
        (folder / "step_00000003").rmdir()
    return first.failure, second.failure, third.failure


@pytest.mark.parametrize(
    "saved_on",
    [
        1,
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.long),
    ],
)
def test_rows_saved_on_some_ranks_load_on_any_number(tmp_path, saved_on):
    outcomes = run_ranks(saved_on, save_twice, tmp_path) if saved_on > 1 else [save_twice(tmp_path)]
    assert set(outcomes) == {outcomes[0]}, "all ranks must get the same outcome"
    first, second, third = outcomes[0]
    assert first == "" and f"rank {saved_on - 1}" in second and "File too large" in second
    assert "rank 0" in third and "not empty" in third
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


def save_while_rank_1_reads_step_1(folder):
    rank, world_size = collectives.rank(), collectives.world_size()
    steps_in_use = {1} if rank == 1 else set()
    writer = CheckpointWriter(folder, keep=1, asynchronous=False, steps_in_use=lambda: steps_in_use)
    for step in (1, 2, 3):
        writer.save(snapshot(step, rank=rank, world_size=world_size))
    kept = complete_steps(folder) if rank == 0 and not writer.finish() else []
    steps_in_use.clear()
    writer.save(snapshot(4, rank=rank, world_size=world_size))
    writer.finish()
    return kept


@pytest.mark.slow
def test_the_leader_keeps_a_checkpoint_as_long_as_another_rank_reads_it(tmp_path):
    assert run_ranks(2, save_while_rank_1_reads_step_1, tmp_path)[0] == [1, 3]
    assert complete_steps(tmp_path) == [4]


def save_on_a_disk_of_its_own(folder):
    """Save on one of two hosts that share no folder; return whether the name of the folder of checkpoints is synced."""
    rank, synced = collectives.rank(), []
    run = folder / f"host{rank}"
    run.mkdir()
    with patch.object(commit, "sync_folder", synced.append):
        writer = CheckpointWriter(run / "checkpoints", asynchronous=False, is_owner=True)
        assert not writer.save(snapshot(1, rank=rank, world_size=2)).failure
    return run in synced


@pytest.mark.slow
def test_a_power_cut_removes_the_folder_of_checkpoints_on_no_host(tmp_path):
    assert run_ranks(2, save_on_a_disk_of_its_own, tmp_path) == [True, True]
    assert [complete_steps(tmp_path / f"host{rank}" / "checkpoints") for rank in range(2)] == [[1], [1]]
