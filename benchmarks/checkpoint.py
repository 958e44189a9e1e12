"""How long asynchronous and synchronous saves of a checkpoint stop training.

Needs twice the size of the checkpoint in memory and three times on the disk; all files are removed at the end.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import run
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.checkpoint.snapshot import ClassRows, Snapshot

_EMBEDDING_SIZE = 512
_PREPARE_SECONDS = 10
"""Enough for the writer to allocate its buffers, which a run does during its first steps."""
_STEP_SECONDS = 0.05
"""Between two looks at a save that is under way: a step of training."""


def measure_checkpoints(
    gigabytes: float = 4.0,
    saves: int = 3,
    folder: Path | None = None,
    device: str = "cpu",
    prepare_seconds: float = _PREPARE_SECONDS,
) -> dict[str, Any]:
    """Return the seconds that a save stops training, and those until it is on the disk.

    Args:
        gigabytes: size of a checkpoint, in 1e9 bytes.
        saves: counted saves of each kind; the asynchronous writer makes one more, which is reported apart.
        folder: folder on the disk to measure; the folder for temporary files if None.
        device: where the training state is: cpu or cuda.
        prepare_seconds: between the creation of the writer and its first save.
    """
    snapshot = _training_state(gigabytes, device)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch)
        synchronous = _measure_saves(CheckpointWriter(path, keep=1, asynchronous=False), snapshot, saves)
        writer = CheckpointWriter(path, keep=1, asynchronous=True)
        # A run prepares the writer after its first step, which is long before its first save.
        writer.prepare(snapshot)
        time.sleep(prepare_seconds)
        first, *later = _measure_saves(writer, snapshot, saves + 1)
        start = time.perf_counter()
        Checkpoint.open(path).verify()
        verify_s = time.perf_counter() - start
    synchronous_s = statistics.median(stall for stall, _ in synchronous)
    stall_s = statistics.median(stall for stall, _ in later)
    return {
        "gigabytes": gigabytes,
        "device": device,
        "synchronous_s": synchronous_s,
        "asynchronous_stall_s": stall_s,
        "asynchronous_first_stall_s": first[0],
        "asynchronous_saved_s": statistics.median(saved for _, saved in later),
        "stall_share": stall_s / synchronous_s,
        "verify_s": verify_s,
    }


def _training_state(gigabytes: float, device: str) -> Snapshot:
    """Return a state in which, as in a run, nearly all bytes are class centers and their momentum."""
    classes = round(gigabytes * 1e9 / (2 * 4 * _EMBEDDING_SIZE))
    rows = {name: torch.randn(classes, _EMBEDDING_SIZE, device=device) for name in ("weight", "momentum")}
    replicated = {"backbone.weight": torch.randn(1 << 20, device=device)}
    rank_state = {"random.cpu": torch.get_rng_state()}
    return Snapshot(1, replicated, (ClassRows(0, classes, rows),), classes, rank_state)


def _measure_saves(writer: CheckpointWriter, snapshot: Snapshot, saves: int) -> list[tuple[float, float]]:
    """Return, for each save, the seconds that the caller waited and the seconds until all was on the disk."""
    measured = []
    for _ in range(saves):
        snapshot = replace(snapshot, step=snapshot.step + 1)
        start = time.perf_counter()
        outcome = writer.save(snapshot)
        stall = time.perf_counter() - start
        while writer.in_flight:
            time.sleep(_STEP_SECONDS)
            poll_start = time.perf_counter()
            outcome = writer.poll()
            stall += time.perf_counter() - poll_start
        measured.append((stall, time.perf_counter() - start))
        writer.finish()
        assert outcome is not None and not outcome.failure, outcome
    return measured


if __name__ == "__main__":
    run(measure_checkpoints)
