"""The loader beside the bare JPEG decoder and beside a DataLoader with PIL: `python benchmarks/loader.py`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from facetrain.bench.loader import measure_loader


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a dataset; generated images of about 8 kB if left out")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each way and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    report = measure_loader(
        options.data,
        workers=options.workers,
        batch_size=options.batch_size,
        seconds=options.seconds,
        rounds=options.rounds,
        device=torch.device(options.device),
    )
    print(json.dumps(report.as_json(), indent=2))


if __name__ == "__main__":
    main()
