"""Checkpoint benchmark: how long asynchronous and synchronous saves stop training.

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

from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.save import CheckpointWriter, Saved, SaveFailed
from facetrain.checkpoint.snapshot import Snapshot
from facetrain.errors import RunError, UsageError
from facetrain.files import os_errors_as

_EMBEDDING_SIZE = 512
_PREPARE_SECONDS = 10
"""Enough for the writer to allocate its buffers, which a run does during its first steps."""
_STEP_SECONDS = 0.05
"""Between two looks at a save that is under way: a step of training."""


def measure_checkpoints(folder: Path | None, *, gigabytes: float, saves: int, device: str) -> dict[str, Any]:
    """Return the seconds that a save stops training, and those until it is on the disk.

    Args:
        folder: folder on the disk to measure; the folder for temporary files if None.
        gigabytes: size of a checkpoint, in 1e9 bytes.
        saves: counted saves of each kind; the asynchronous writer makes one more, which is reported apart.
        device: where the training state is: cpu or cuda.

    Raises:
        UsageError: there is no such folder.
        RunError: a save failed.
    """
    if folder is not None and not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; name a folder on the disk to measure")
    snapshot = _training_state(gigabytes, device)
    with (
        os_errors_as(UsageError, folder or Path(), "name a folder on the disk to measure"),
        tempfile.TemporaryDirectory(dir=folder) as scratch,
    ):
        path = Path(scratch)
        synchronous = _measure_saves(path, snapshot, asynchronous=False, saves=saves)
        first, *later = _measure_saves(path, snapshot, asynchronous=True, saves=saves + 1)
        start = time.perf_counter()
        Checkpoint.open(path).verify()
        verify_s = time.perf_counter() - start
    synchronous_s = statistics.median(each["stall_s"] for each in synchronous)
    stall_s = statistics.median(each["stall_s"] for each in later)
    return {
        "gigabytes": gigabytes,
        "device": device,
        "synchronous_s": synchronous_s,
        "asynchronous_stall_s": stall_s,
        "asynchronous_first_stall_s": first["stall_s"],
        "asynchronous_saved_s": statistics.median(each["saved_s"] for each in later),
        "stall_share": stall_s / synchronous_s,
        "verify_s": verify_s,
    }


def _training_state(gigabytes: float, device: str) -> Snapshot:
    """Return a state in which, as in a run, nearly all bytes are class centers and their momentum."""
    classes = round(gigabytes * 1e9 / (2 * 4 * _EMBEDDING_SIZE))
    rows = {name: torch.randn(classes, _EMBEDDING_SIZE, device=device) for name in ("weight", "momentum")}
    replicated = {"backbone.weight": torch.randn(1 << 20, device=device)}
    rank_state = {"random.cpu": torch.get_rng_state()}
    return Snapshot(1, replicated, rows, (0, classes), classes, rank_state)


def _measure_saves(
    folder: Path, snapshot: Snapshot, *, asynchronous: bool, saves: int
) -> list[dict[str, float]]:
    """Return, for each save, the seconds that the caller waited and the seconds until all was on the disk."""
    writer = CheckpointWriter(folder, keep=1, asynchronous=asynchronous)
    measured = []
    if asynchronous:
        # A run prepares the writer after its first step, which is long before its first save.
        writer.prepare(snapshot)
        time.sleep(_PREPARE_SECONDS)
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
        saved = time.perf_counter() - start
        writer.finish()
        if isinstance(outcome, SaveFailed):
            raise RunError(f"bench checkpoint: a save failed: {outcome.reason}")
        assert isinstance(outcome, Saved)
        measured.append({"stall_s": stall, "saved_s": saved})
    return measured
