"""Soak test: train with random faults for some time: `python -m tests.soak.run --minutes 60`.

Runs are killed at random moments (all processes, one rank, or the launcher alone) and continued with
`facetrain resume`, in one scenario on another number of ranks, while the disk fills up and empties again.
Every checkpoint is verified after every kill. At its end a run is compared with an uninterrupted one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

from tests.soak.faults import Tally, train_with_faults
from tests.soak.scenarios import SCENARIOS, write_dataset
from tests.support.processes import adopt_orphans

_COLUMNS = {
    "runs": "runs", "kills": "kills", "while_saving": "saving", "rank_changes": "changes",
    "disk_full": "disk full", "failed_saves": "failed", "checkpoints": "saved", "steps": "steps",
    "steps_lost": "lost", "most_lost": "most", "bytes_lost": "bytes", "orphans": "orphans",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="duration; default: 60")
    parser.add_argument("--seed", type=int, default=None, help="seed of the faults; default: the time")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON and nothing else")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int(time.time())
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="facetrain-soak-") as folder:
        tallies = soak(Path(folder), options.minutes * 60, random.Random(seed))
    counts = {
        "minutes": options.minutes, "seed": seed, "torch": torch.__version__,
        "python": platform.python_version(), "scenarios": [asdict(tally) for tally in tallies],
    }  # fmt: skip
    print(json.dumps(counts, indent=1) if options.json else table(tallies))
    sys.exit(any(tally.faults for tally in tallies))


def soak(folder: Path, seconds: float, rng: random.Random) -> list[Tally]:
    """Train all scenarios again and again until the time is over."""
    write_dataset(folder / "data")
    deadline = time.monotonic() + seconds
    tallies = [Tally(scenario.name) for scenario in SCENARIOS]
    while time.monotonic() < deadline:
        for scenario, tally in zip(SCENARIOS, tallies, strict=True):
            if time.monotonic() < deadline:
                train_with_faults(scenario, tally, folder, rng)
                print(json.dumps(asdict(tally)), file=sys.stderr, flush=True)
    return tallies


def table(tallies: list[Tally]) -> str:
    """Format the counts as a table."""
    width = max(len(tally.scenario) for tally in tallies)
    lines = [" " * width + "".join(f"{head:>11}" for head in _COLUMNS.values())]
    for tally in tallies:
        lines.append(
            f"{tally.scenario:{width}}" + "".join(f"{getattr(tally, name):11,}" for name in _COLUMNS)
        )
    lines += [f"fault: {tally.scenario}: {fault}" for tally in tallies for fault in tally.faults]
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
