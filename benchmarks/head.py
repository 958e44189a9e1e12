"""The head beside a plain PyTorch implementation of the same algorithm, and the bytes that ranks exchange.

    python -m benchmarks.head                          every way at 1 million identities (14 GB of memory)
    python -m benchmarks.head --sizes 1e5 1e6          several sizes
    python -m benchmarks.head --ways head_bf16_stored8 --sizes 1e7
    python -m benchmarks.head --ranks 2                bytes that a rank sends in a step, at two sizes

`facetrain bench head` is the same without --ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from facetrain.bench.head import USUAL, WAYS, OurHead, measure_ways, with_ratios
from facetrain.distributed import collectives
from tests.support.ranks import run_ranks


def traffic_of_one_rank(classes: int, size: int, local_batch: int) -> dict[str, int]:
    """Count the bytes that one rank hands to each collective in one step."""
    ours = OurHead(classes, size, "cpu", Path())
    with collectives.measured_traffic() as counter:
        ours.step(torch.randn(local_batch, size, requires_grad=True), torch.zeros(local_batch).long())
    return dict(counter)


def measure_traffic(world_size: int, size: int, local_batch: int) -> dict[str, Any]:
    """Compare the bytes of a step at two numbers of classes with the formula in docs/head.md."""
    few, many = (
        run_ranks(world_size, traffic_of_one_rank, classes, size, local_batch)[0]
        for classes in (1000, 20_000)
    )
    rows = local_batch * world_size
    formula = {"all_gather": local_batch * (4 * size + 8) + rows * 12, "reduce_scatter": rows * size * 4}
    return {"ranks": world_size, "few_classes": few, "many_classes": many, "formula": formula}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", default=USUAL, choices=WAYS)
    parser.add_argument("--sizes", nargs="+", type=float, default=[1e6], help="numbers of identities")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--embedding-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--disk", type=Path, help="folder on the disk to measure, for centers on disk")
    parser.add_argument(
        "--ranks", type=int, help="measure the traffic between so many gloo processes instead"
    )
    o = parser.parse_args(argv)
    if o.ranks:
        print(json.dumps(measure_traffic(o.ranks, o.embedding_size, o.batch_size // o.ranks), indent=1))
        return
    reports = []
    for classes in o.sizes:
        for report in measure_ways(
            o.ways, int(classes), embedding_size=o.embedding_size, batch_size=o.batch_size, steps=o.steps,
            device=o.device, disk=o.disk,
        ):  # fmt: skip
            reports.append(report)
            print(json.dumps(report), file=sys.stderr)
    print(json.dumps({"torch": torch.__version__, "reports": with_ratios(reports)}, indent=1))


if __name__ == "__main__":
    main()
