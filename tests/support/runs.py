"""Whole runs of the command line: what they have recorded, and how far they are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from facetrain.checkpoint.commit import complete_steps
from facetrain.telemetry.jsonl import read_jsonl
from tests.support.waiting import wait_until

LONG = ["--set", "train.max_steps=100000", "--set", "train.epochs=100000"]
"""Options of a run that goes on until the test ends it."""
BLOCKED_BY_SIGUSR2 = """
import pathlib, signal, threading

def block(number, frame):
    pathlib.Path(__file__).with_name("blocked").touch()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

signal.signal(signal.SIGUSR2, block)
"""
"""sitecustomize.py of a process that waits without end after SIGUSR2. It says so first, by the file `blocked`: then it
handles no signal that came together with SIGUSR2."""
_CLOCK = {"images_per_s", "left_s", "wait_s", "peak_memory_gib"}


def checked(process: subprocess.CompletedProcess, code: int = 0) -> subprocess.CompletedProcess:
    """Return a process that must have ended with `code`."""
    assert process.returncode == code, process.stdout + process.stderr
    return process


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return what a run has recorded, but for what the clock and the machine say."""
    return [
        {k: v for k, v in record.items() if k not in _CLOCK}
        for record in read_jsonl(folder / "metrics.jsonl")
    ]


def losses(folder: Path) -> list[float]:
    """Return the losses that a run has recorded."""
    return [record["loss"] for record in metrics(folder) if "loss" in record]


def distill_losses(folder: Path) -> list[float]:
    """Return the losses of the distillation in the log of a run."""
    records = read_jsonl(folder / "metrics.jsonl")
    return [record["distill_loss"] for record in records if "distill_loss" in record]


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    """Wait until a run has recorded the loss of a step."""
    path, record = folder / "metrics.jsonl", re.compile(rf'"step": {step}, .*"loss"')
    wait_until(lambda: path.exists() and record.search(path.read_text()), process)


def wait_for_checkpoint(folder: Path, process: subprocess.Popen) -> None:
    """Wait for the first complete checkpoint: checkpoints are saved in the background."""
    wait_until(lambda: complete_steps(folder / "checkpoints"), process)
