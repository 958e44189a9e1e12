"""Training with random kills: `python -m tests.support.kill_points CONFIG FOLDER KILLS SEED`.

The process imports all modules and forks the runs, so that a restart after a kill is fast. The first run is not
killed, in FOLDER/whole; the others are resumed until they finish, in FOLDER/killed_0, killed_1, … For each kill the
activity of the killed run is printed, in one word.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import matplotlib.pyplot  # noqa: F401 (a run imports these two when it first needs them)
import torch._dynamo  # noqa: F401

from facetrain.checkpoint.commit import complete_steps
from facetrain.config.loading import load_config
from facetrain.run import training as run
from facetrain.telemetry.jsonl import read_jsonl


def start(config: Path, folder: Path) -> int:
    """Start or resume a run in a new process; return the process id."""
    child = os.fork()
    if child:
        return child
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    # Without reader processes: each would be a new Python, which takes seconds to start.
    loaded = load_config(config, ["data.workers=0"])
    try:
        os._exit((run.resume if complete_steps(folder / "checkpoints") else run.train)(loaded, folder))
    finally:
        os._exit(99)


def kill_after(child: int, seconds: float) -> bool:
    """Kill a process after a time; return False if it has ended before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0, "a run failed without a kill"
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def activity(folder: Path, verify_every: int) -> str:
    """Return the activity of a run when it was killed: saving, starting, evaluating or training."""
    if list(folder.glob("checkpoints/.step_*")):
        return "saving"
    records = read_jsonl(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    if not records:
        return "starting"
    return "evaluating" if records[-1]["step"] % verify_every == 0 and "loss" in records[-1] else "training"


def main(config: Path, folder: Path, kills: int, seed: int) -> None:
    """Train, and kill at random moments until the number of kills is reached."""
    rng, verify_every = random.Random(seed), load_config(config).eval.every_steps
    since = time.monotonic()
    assert not kill_after(start(config, folder / "whole"), 600)
    whole_s, runs = time.monotonic() - since, 0
    while kills > 0:
        target = folder / f"killed_{runs}"
        while kill_after(start(config, target), rng.random() * whole_s if kills > 0 else 600):
            kills -= 1
            print(activity(target, verify_every), flush=True)
        runs += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
