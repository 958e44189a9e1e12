import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from facetrain.checkpoint.commit import LATEST, complete_steps, remove_unfinished
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.manifest import NAME
from facetrain.checkpoint.save import CheckpointWriter, Saved, SaveFailed
from facetrain.errors import CheckpointError
from tests.support.snapshots import snapshot


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_was_saved_comes_back(tmp_path, asynchronous):
    writer = CheckpointWriter(tmp_path, asynchronous=asynchronous)
    writer.save(snapshot(7))
    outcome = writer.finish()
    assert not writer.in_flight and (asynchronous is False or isinstance(outcome, Saved))
    checkpoint = Checkpoint.open(tmp_path)
    assert (checkpoint.step, checkpoint.meta) == (7, {"note": "a"})
    assert checkpoint.replicated("backbone.")["w"].tolist() == [7, 7, 7]
    assert checkpoint.rows("weight", 3, 6)[:, 0].tolist() == [10, 11, 12]
    assert checkpoint.rank_state(0)["cpu"].tolist() == [0]
    assert (tmp_path / LATEST).read_text() == "step_00000007\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000007"]


def test_an_asynchronous_save_keeps_the_state_of_its_own_moment(tmp_path):
    state = snapshot(1)
    writer = CheckpointWriter(tmp_path)
    writer.save(state)
    state.replicated["backbone.w"].fill_(99)
    state.rows["weight"].fill_(99)
    while writer.poll() is None:
        time.sleep(0.01)
    assert Checkpoint.open(tmp_path).replicated("backbone.")["w"].tolist() == [1, 1, 1]
    assert Checkpoint.open(tmp_path).rows("weight", 0, 1)[0, 0] == 1


def test_the_last_few_and_the_best_stay(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=2, asynchronous=False, best_metric="lfw/accuracy")
    for step, accuracy in enumerate([0.5, 0.9, 0.7, 0.8, 0.6], start=1):
        writer.save(snapshot(step, metrics={"lfw/accuracy": accuracy}))
    assert complete_steps(tmp_path) == [2, 4, 5]


def test_saving_a_step_again_replaces_it(tmp_path):
    writer = CheckpointWriter(tmp_path, asynchronous=False)
    for note in ("first", "second"):
        writer.save(snapshot(3, meta={"note": note}))
    assert Checkpoint.open(tmp_path).meta == {"note": "second"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000003"]


def fail_on_a_full_disk(tmp_path, monkeypatch):
    import facetrain.checkpoint.save as save

    def full(tensors, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(save, "save_file", full)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_fails_the_save_and_leaves_the_checkpoint_before(tmp_path, monkeypatch, asynchronous):
    writer = CheckpointWriter(tmp_path, keep=1, asynchronous=asynchronous)
    writer.save(snapshot(1))
    writer.finish()
    with monkeypatch.context() as patch:
        fail_on_a_full_disk(tmp_path, patch)
        outcome = writer.save(snapshot(2))
        outcome = writer.finish() if asynchronous else outcome
    assert isinstance(outcome, SaveFailed)
    assert "rank 0" in outcome.reason and "No space left on device" in outcome.reason
    assert Checkpoint.open(tmp_path).step == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]
    writer.save(snapshot(3))
    writer.finish()
    assert complete_steps(tmp_path) == [3]


def test_a_folder_that_cannot_be_made_fails_the_save_only(tmp_path):
    (tmp_path / "file").write_text("in the way")
    outcome = CheckpointWriter(tmp_path / "file" / "checkpoints", asynchronous=False).save(snapshot(1))
    assert isinstance(outcome, SaveFailed) and "Not a directory" in outcome.reason


def saved(tmp_path):
    CheckpointWriter(tmp_path, asynchronous=False).save(snapshot(1))
    return tmp_path / "step_00000001"


def change(path, old, new):
    path.write_bytes(path.read_bytes().replace(old, new, 1))


def edit(folder, **changes):
    value = json.loads((folder / NAME).read_text())
    value["files"][0] |= changes
    (folder / NAME).write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: os.truncate(f / "replicated.safetensors", 50), "has 50 bytes"),
        (lambda f: change(f / "replicated.safetensors", b"\0\0\x80?", b"\0\0\x80@"), "checksum"),
        (lambda f: (f / "rank_00000.safetensors").unlink(), "is missing"),
        (
            lambda f: (
                (f / "rank_00000.safetensors").unlink(),
                (f / "rank_00000.safetensors").symlink_to("/etc/passwd"),
            ),
            "no plain file",
        ),
        (lambda f: edit(f, name="../../secret.safetensors"), "which no checkpoint has"),
        (lambda f: edit(f, name="/etc/passwd"), "which no checkpoint has"),
        (lambda f: edit(f, size=-1), "makes no sense"),
        (lambda f: edit(f, extra=1), "is no manifest"),
        (lambda f: (f / NAME).write_text("[" * 100_000), "cannot be read|is no manifest"),
        (lambda f: (f / NAME).write_text('{"format": 2}'), "another version"),
        (lambda f: (f / NAME).write_text("3"), "is no manifest"),
    ],
)
def test_a_damaged_or_crafted_checkpoint_is_refused(tmp_path, damage, said):
    damage(saved(tmp_path))
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.open(tmp_path).verify()


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Checkpoint.open(tmp_path)
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint of step 5; there are 1"):
        Checkpoint.open(tmp_path, step=5)
    with pytest.raises(CheckpointError, match="no rows of class 11"):
        Checkpoint.open(tmp_path).rows("weight", 9, 13)
    with pytest.raises(CheckpointError, match="no table velocity"):
        Checkpoint.open(tmp_path).rows("velocity", 0, 1)


SAVER = """
import sys
from pathlib import Path
from facetrain.checkpoint.save import CheckpointWriter
from tests.support.snapshots import snapshot
writer = CheckpointWriter(Path(sys.argv[1]), keep=2)
for step in range(1, 100000):
    writer.save(snapshot(step, num_classes=3000))
    print(step, flush=True)
"""


def test_killed_at_any_moment_the_latest_checkpoint_is_whole(tmp_path):
    random.seed(0)
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(3):
            process.stdout.readline()
        time.sleep(random.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        checkpoint = Checkpoint.open(tmp_path)
        checkpoint.verify()
        assert (
            checkpoint.rows("weight", 0, 3000)[:, 0].tolist()
            == (torch.arange(3000.0) + checkpoint.step).tolist()
        )
        remove_unfinished(tmp_path)
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".step")]
