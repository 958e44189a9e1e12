"""Checkpoints during training."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from facetrain.checkpoint import commit
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.errors import CheckpointError, RunError
from facetrain.run.callbacks.checkpointing import Checkpointing
from facetrain.run.outputs import RunOutputs
from tests.support.checkpoints import update_manifest
from tests.support.waiting import wait_until
from tests.unit.run.callbacks.helpers import Board, Lines


def checkpointing_of(folder, board, lines, last_saved=None, *, asynchronous=True):
    writer = CheckpointWriter(folder, keep=3, asynchronous=asynchronous, best_metric=None)
    console = Lines()
    console.lines = lines
    outputs = RunOutputs(board, console=console)
    return Checkpointing(writer, outputs, {"model": {}}, last_saved=last_saved)


def test_nothing_is_saved_once_another_process_writes_the_run(state, tmp_path):
    def refuse():
        raise RunError("another process writes the run")

    checkpointing = checkpointing_of(tmp_path, Board(), [])
    checkpointing.check_lock = refuse
    with pytest.raises(RunError, match="another process"):
        checkpointing.save(state)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_saved_also_after_a_step_that_was_skipped(state, tmp_path):
    lines = []
    checkpointing = checkpointing_of(tmp_path, Board(), lines, asynchronous=False)
    state.skips_in_a_row = torch.tensor(1.0)
    checkpointing.save(state)
    checkpointing.require_saved(state)
    assert not lines


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_the_same_number_of_ranks_continues_from_the_statistics_of_each_rank(
    state, tmp_path, world_size
):
    CheckpointWriter(tmp_path, asynchronous=False).save(state.snapshot({}))
    rank_file = Checkpoint.open(tmp_path).folder / "rank_00000.safetensors"
    own = {name: value + 1 for name, value in load_file(rank_file).items()}
    save_file(own, rank_file)
    update_manifest(rank_file.parent, rank_file)
    averaged = {name: value.clone() for name, value in state.backbone.named_buffers()}
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.manifest = replace(checkpoint.manifest, world_size=world_size)
    state.restore(checkpoint)
    for name, value in state.backbone.named_buffers():
        assert torch.equal(value, own[f"buffer.{name}"] if world_size == 1 else averaged[name])


def test_a_resumed_run_knows_the_newest_verification(state, tmp_path):
    newest = {"verified_step": 3, "metrics": {"lfw/accuracy": 0.5}, "unverified": True}
    vars(state).update(newest)
    CheckpointWriter(tmp_path, asynchronous=False).save(state.snapshot({}))
    vars(state).update(verified_step=None, metrics={}, unverified=False)
    state.restore(Checkpoint.open(tmp_path))
    assert {name: getattr(state, name) for name in newest} == newest


def test_a_checkpoint_is_committed_by_a_later_poll(state, tmp_path):
    lines, board = [], Board()
    checkpointing = checkpointing_of(tmp_path, board, lines)
    checkpointing.poll(state)  # allocates the memory for copies
    assert checkpointing.writer.is_prepared
    checkpointing.writer.prepare = None  # once is enough
    checkpointing.poll(state)
    state.step = 1
    checkpointing.save(state)
    assert checkpointing.outputs.console.progress == (1, "saving a checkpoint")
    wait_until(lambda: checkpointing.poll(state) or checkpointing.last_saved)
    assert checkpointing.last_saved == 1 and not lines and not board.written
    checkpointing.require_saved(state)
    assert Checkpoint.open(tmp_path).step == 1


def test_the_last_checkpoint_is_uploaded_while_older_ones_are_removed(state, tmp_path, monkeypatch):
    added, removed = threading.Event(), []
    monkeypatch.setattr(commit, "remove_surplus", lambda *_, **__: removed.append(added.wait(60)))
    checkpointing = checkpointing_of(tmp_path, Board(), [])
    checkpointing.uploads = SimpleNamespace(add=lambda outcome: added.set())
    checkpointing.save(state)
    checkpointing.finish()
    assert removed == [True]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    ("last_saved", "advice"),
    [(None, "start the run again"), (7, "`facetrain resume` continues from step 7$")],
)
def test_a_checkpoint_that_cannot_be_written_is_reported_and_refused_as_the_last_one(
    state, tmp_path, last_saved, advice, asynchronous
):
    (tmp_path / "file").touch()
    lines, board = [], Board()
    checkpointing = checkpointing_of(
        tmp_path / "file", board, lines, last_saved=last_saved, asynchronous=asynchronous
    )
    state.step = 9
    checkpointing.save(state, ends=True)
    checkpointing.finish()
    assert board.written == [(9, {"save_failed": 1.0})]
    assert len(lines) == 1 and lines[0].startswith("warning: checkpoint of step 9 was not saved: rank 0: ")
    assert "continues" not in lines[0], "it was the last one"
    with pytest.raises(CheckpointError, match=f"of step 9 was not saved [(]rank 0: .*{advice}"):
        checkpointing.require_saved(state)
