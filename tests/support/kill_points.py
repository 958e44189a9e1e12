"""Train a run to its end through many kills: `python -m tests.support.kill_points CONFIG FOLDER KILLS SEED`.

One process imports everything and forks the runs, so that a kill costs no start of Python. The first run is
undisturbed, in FOLDER/whole; the others end in FOLDER/killed_0, killed_1, … One word a kill says at what it came.
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
from facetrain.run.training import training as run
from facetrain.telemetry.jsonl import read_jsonl


def start(config: Path, folder: Path) -> int:
    """Begin a run, or go on with it, in a process of its own; return its number."""
    child = os.fork()
    if child:
        return child
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    # A reading process would be a new Python, which imports torch before it reads.
    described = load_config(config, ["data.workers=0"])
    try:
        os._exit((run.resume if complete_steps(folder / "checkpoints") else run.train)(described, folder))
    finally:
        os._exit(99)


def kill_after(child: int, seconds: float) -> bool:
    """Kill a process unless it has ended before; return whether it was killed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0, "a run failed by itself"
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def moment(folder: Path, verify_every: int) -> str:
    """Return what a run was at when it was killed."""
    if list(folder.glob("checkpoints/.step_*")):
        return "saving"
    records = read_jsonl(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    if not records:
        return "beginning"
    return "evaluating" if records[-1]["step"] % verify_every == 0 and "loss" in records[-1] else "training"


def main(config: Path, folder: Path, kills: int, seed: int) -> None:
    """Kill until there were enough, each time at another moment."""
    rng, verify_every = random.Random(seed), load_config(config).eval.every_steps
    since = time.monotonic()
    assert not kill_after(start(config, folder / "whole"), 600)
    whole_s, runs = time.monotonic() - since, 0
    while kills > 0:
        target = folder / f"killed_{runs}"
        while kill_after(start(config, target), rng.random() * whole_s if kills > 0 else 600):
            kills -= 1
            print(moment(target, verify_every), flush=True)
        runs += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
