"""Weak scaling: whole steps on 1, 2 and 4 processes of one thread each, the same batch on every one.

    python -m benchmarks.scaling                                            r18, 16 images each
    python -m benchmarks.scaling --processes 1 2 --backbone r50 --rounds 5

Processes beyond the cores share them, so the ideal is one process's images per second times the cores in use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def measure_once(processes: int, o: argparse.Namespace) -> dict[str, Any]:
    """Run `facetrain bench train` on so many processes; return images per second and shares of the time."""
    sets = (f"model.backbone={o.backbone}", f"train.batch_size={o.batch_size}", "train.device=cpu")
    command = [sys.executable, "-m", "facetrain", "bench", "train", "--json", "--input", "synthetic"]
    command += ["--nproc-per-node", str(processes), "--steps", str(o.steps), "--rounds", "1"]
    command += [word for value in (*sets, *o.set) for word in ("--set", value)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)["inputs"]["synthetic"]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--backbone", default="r18")
    parser.add_argument("--batch-size", type=int, default=16, help="images of each process")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    o = parser.parse_args(argv)
    found: dict[int, list[dict[str, Any]]] = {processes: [] for processes in o.processes}
    for _ in range(o.rounds):  # in turn: a busy machine hits all alike
        for processes in o.processes:
            found[processes].append(measure_once(processes, o))
    cores = len(os.sched_getaffinity(0))
    speed = {n: statistics.median(once["images_per_s"] for once in rounds) for n, rounds in found.items()}
    one = speed[o.processes[0]] / min(o.processes[0], cores)
    report = {
        n: {
            "images_per_s": speed[n],
            "efficiency": speed[n] / (one * min(n, cores)),
            "collectives": statistics.median(once["share_of_time"]["collectives"] for once in rounds),
        }
        for n, rounds in found.items()
    }
    print(json.dumps({"cores": cores, "processes": report}, indent=1))


if __name__ == "__main__":
    main()
