"""SIGKILL at random moments of a save: the latest checkpoint is complete, and no saved step is lost."""

import subprocess
import sys

import pytest

# One process imports torch and forks children, one at a time; each saves in a loop until it is killed.
KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from facetrain.checkpoint.commit import complete_steps, remove_unfinished
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.save import CheckpointWriter
from tests.support.snapshots import snapshot

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
random.seed(0)

def save_in_a_loop(step, pipe):
    writer = CheckpointWriter(folder, keep=2)
    remove_unfinished(folder)
    while True:
        writer.save(snapshot(step, num_classes=3000, meta={"twin": step}))
        os.write(pipe, writer.finish().step.to_bytes(8, "little"))
        step += random.random() < 0.7  # sometimes the same step again

step = 1
for number in range(kills):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        random.seed(number)
        save_in_a_loop(step, write)
    os.close(write)
    os.read(read, 8)
    time.sleep(random.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    reported = os.read(read, 1 << 20)
    os.close(read)
    unfinished = [entry.name for entry in folder.iterdir() if entry.name.startswith(".step")]
    remove_unfinished(folder)
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    assert checkpoint.rows("weight", 2999, 3000)[0, 0] == 2999 + checkpoint.step
    assert checkpoint.meta["twin"] == checkpoint.step
    if reported:
        assert checkpoint.step >= int.from_bytes(reported[-8:], "little"), "a finished save was lost"
    Checkpoint.open(folder / "latest").verify()
    assert len(complete_steps(folder)) <= 3
    assert not [entry for entry in folder.iterdir() if entry.name.startswith(".step")]
    step = checkpoint.step + 1
    print("unfinished" if unfinished else "between", flush=True)
"""


@pytest.mark.slow
def test_the_latest_checkpoint_is_complete_after_a_kill_at_any_moment(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), "40"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    moments = done.stdout.split()
    assert len(moments) == 40 and moments.count("unfinished") >= 10, "too few kills hit a save"
