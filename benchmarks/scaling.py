"""Weak scaling: whole steps on 1, 2 and 4 processes of one thread each, the same batch on every one.

    python -m benchmarks.scaling                                            r18, 16 images each
    python -m benchmarks.scaling --processes 1 2 --backbone r50 --rounds 5
    python -m benchmarks.scaling --batch-size 8 --keep scaling.jsonl        stopped and started again, it goes on

Processes beyond the cores share them, so the ideal is one process's images per second times the cores in use. Beside
each figure stands that of a model with two numbers fitted to all of them: a core's seconds for a step, and the bytes
per second at which gradients are exchanged.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from facetrain.backbone.zoo import build_backbone


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


def fitted_steps(seconds: dict[int, float], cores: int, gradient_bytes: int) -> dict[int, float]:
    """Return the model's seconds of a step for each number of processes, from those measured, by least squares.

    n processes on c cores take t · max(n / c, 1) + 2 (n − 1) / n · gradient_bytes / r (a ring's all-reduce).
    """
    terms = np.array([[max(n / cores, 1), 2 * (n - 1) / n * gradient_bytes] for n in seconds])
    # Relative errors count: a step of four processes takes twice as long as one of two.
    measured = np.array(list(seconds.values()))
    found, *_ = np.linalg.lstsq(terms / measured[:, None], np.ones(len(measured)), rcond=None)
    return dict(zip(seconds, (terms @ found).tolist(), strict=True))


def gradient_bytes(backbone: str) -> int:
    """Return what DDP exchanges for a backbone: four bytes for each trainable number."""
    with torch.device("meta"):
        return sum(4 * parameter.numel() for parameter in build_backbone(backbone).parameters())


def measure_all(o: argparse.Namespace) -> dict[int, list[dict[str, Any]]]:
    """Measure in rounds, but for what the file to keep results in has already."""
    found: dict[int, list[dict[str, Any]]] = {processes: [] for processes in o.processes}
    for line in o.keep.read_text().splitlines() if o.keep and o.keep.exists() else ():
        once = json.loads(line)
        if once["processes"] in found:
            found[once["processes"]].append(once)
    for number in range(o.rounds):  # in turn: a busy machine hits all alike
        for processes in o.processes:
            if len(found[processes]) > number:
                continue
            once = {"processes": processes} | measure_once(processes, o)
            found[processes].append(once)
            if o.keep:
                with o.keep.open("a") as file:
                    file.write(json.dumps(once) + "\n")
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
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="Keep each result there, and go on from it."
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    o = parser.parse_args(argv)
    found = measure_all(o)
    cores = len(os.sched_getaffinity(0))
    speed = {n: statistics.median(once["images_per_s"] for once in rounds) for n, rounds in found.items()}
    one = speed[o.processes[0]] / min(o.processes[0], cores)
    seconds = {n: n * o.batch_size / speed[n] for n in o.processes}
    model = fitted_steps(seconds, cores, gradient_bytes(o.backbone))
    report = {
        n: {
            "images_per_s": speed[n],
            "images_per_s_of_the_model": n * o.batch_size / model[n],
            "efficiency": speed[n] / (one * min(n, cores)),
            "collectives": statistics.median(once["share_of_time"]["collectives"] for once in rounds),
        }
        for n, rounds in found.items()
    }
    print(json.dumps({"cores": cores, "processes": report}, indent=1))


if __name__ == "__main__":
    main()
