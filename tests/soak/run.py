"""Train under fire for a while: `python -m tests.soak.run --minutes 60`.

Runs are killed at random moments (all their processes, one rank, or the agent alone), go on with
`facetrain resume`, on another number of ranks in some, while the disk fills up and empties again. After
every kill each checkpoint is verified; at its end a run is compared with one that nobody disturbed.
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

from tests.soak.fire import Tally, under_fire
from tests.soak.scenes import SCENES, draw_dataset
from tests.support.processes import adopt_orphans

_COLUMNS = {
    "runs": "runs", "kills": "kills", "while_saving": "saving", "rank_changes": "changes",
    "disk_full": "disk full", "failed_saves": "failed", "checkpoints": "saved", "steps": "steps",
    "steps_lost": "lost", "most_lost": "most", "bytes_lost": "bytes", "orphans": "orphans",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="by default another one each time")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int(time.time())
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="facetrain-soak-") as folder:
        tallies = soak(Path(folder), options.minutes * 60, random.Random(seed))
    figures = {
        "minutes": options.minutes, "seed": seed, "torch": torch.__version__,
        "python": platform.python_version(), "scenes": [asdict(tally) for tally in tallies],
    }  # fmt: skip
    print(json.dumps(figures, indent=1) if options.json else table(tallies))
    sys.exit(any(tally.faults for tally in tallies))


def soak(folder: Path, seconds: float, rng: random.Random) -> list[Tally]:
    """Go through the scenes, again and again, until the time is over."""
    draw_dataset(folder / "data")
    until = time.monotonic() + seconds
    tallies = [Tally(scene.name) for scene in SCENES]
    while time.monotonic() < until:
        for scene, tally in zip(SCENES, tallies, strict=True):
            if time.monotonic() < until:
                under_fire(scene, tally, folder, rng)
                print(json.dumps(asdict(tally)), file=sys.stderr, flush=True)
    return tallies


def table(tallies: list[Tally]) -> str:
    """Tell the figures in lines."""
    width = max(len(tally.scene) for tally in tallies)
    lines = [" " * width + "".join(f"{head:>11}" for head in _COLUMNS.values())]
    for tally in tallies:
        lines.append(f"{tally.scene:{width}}" + "".join(f"{getattr(tally, name):11,}" for name in _COLUMNS))
    lines += [f"fault: {tally.scene}: {fault}" for tally in tallies for fault in tally.faults]
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
