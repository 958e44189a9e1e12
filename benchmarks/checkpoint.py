"""How long training stands still for a save: asynchronous against synchronous, for a state of several GB.

    python benchmarks/checkpoint.py --gigabytes 4

Needs twice that in memory, and three times on the disk; nothing stays behind.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.save import CheckpointWriter, Saved, SaveFailed
from facetrain.checkpoint.snapshot import Snapshot

_EMBEDDING = 512
_PREPARED_WITHIN_S = 10


def state(step: int, gigabytes: float, device: str) -> Snapshot:
    """Return a state like a run's: nearly all of it is class centers and their momentum."""
    classes = round(gigabytes * 1e9 / (2 * 4 * _EMBEDDING))
    rows = {name: torch.randn(classes, _EMBEDDING, device=device) for name in ("weight", "momentum")}
    replicated = {"backbone.weight": torch.randn(1 << 20, device=device)}
    rank_state = {"random.cpu": torch.get_rng_state()}
    return Snapshot(step, replicated, rows, (0, classes), classes, rank_state)


def measure(folder: Path, snapshot: Snapshot, *, asynchronous: bool, times: int) -> list[dict[str, float]]:
    """Save several times; return for each how long the caller stood still, and when all was on the disk."""
    writer = CheckpointWriter(folder, keep=1, asynchronous=asynchronous)
    measured = []
    if asynchronous:
        writer.prepare(snapshot)  # as a run does after its first step, which is long before its first save
        time.sleep(_PREPARED_WITHIN_S)
    for _ in range(times):
        snapshot = replace(snapshot, step=snapshot.step + 1)
        since = time.perf_counter()
        outcome = writer.save(snapshot)
        stall = time.perf_counter() - since
        while writer.in_flight:
            time.sleep(0.05)  # a step of training
            asked = time.perf_counter()
            outcome = writer.poll()
            stall += time.perf_counter() - asked
        saved = time.perf_counter() - since
        writer.finish()
        if isinstance(outcome, SaveFailed):
            raise SystemExit(f"error: {outcome.reason}")
        assert isinstance(outcome, Saved)
        measured.append({"stall_s": stall, "saved_s": saved})
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; by default the one for temporary files"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    snapshot = state(1, options.gigabytes, options.device)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder)
        waiting = measure(path, snapshot, asynchronous=False, times=options.times)
        behind = measure(path, snapshot, asynchronous=True, times=options.times + 1)
        since = time.perf_counter()
        Checkpoint.open(path).verify()
        verified_s = time.perf_counter() - since
    stalls = [each["stall_s"] for each in behind]
    synchronous_s = statistics.median(each["stall_s"] for each in waiting)
    report = {
        "gigabytes": options.gigabytes,
        "device": options.device,
        "synchronous_s": synchronous_s,
        "asynchronous_stall_s": statistics.median(stalls[1:]),
        "asynchronous_first_stall_s": stalls[0],
        "asynchronous_saved_s": statistics.median(each["saved_s"] for each in behind[1:]),
        "stall_share": statistics.median(stalls[1:]) / synchronous_s,
        "verified_s": verified_s,
    }
    print(
        json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in report.items()}, indent=1)
    )


if __name__ == "__main__":
    main()
