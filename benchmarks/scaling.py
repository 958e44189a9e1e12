"""Weak scaling on the CPU: whole steps on 1, 2 and 4 processes, the same batch on each.

Each process has one thread. Processes in excess of the cores share them, so the ideal speed is the speed of one
process times the cores in use. Each result is compared with a model of two numbers fitted to all of them: the
seconds that a core needs for a step, and the bytes per second at which gradients are exchanged.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common import run
from facetrain.backbone.zoo import build_on_meta
from facetrain.cpu_cores import usable_cores


def measure_scaling(
    processes: list[int] = [1, 2, 4],  # noqa: B006
    backbone: str = "r18",
    batch_size: int = 16,
    steps: int = 3,
    rounds: int = 3,
    set_: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE")] = [],  # noqa: B006
) -> dict[str, Any]:
    """Return images per second, efficiency and share of time in collectives for each number of processes.

    `batch_size` images on each process; `--set` changes values of the config.
    """
    sets = [f"model.backbone={backbone}", f"train.batch_size={batch_size}", *set_]
    found: dict[int, list[dict[str, Any]]] = {count: [] for count in processes}
    for _ in range(rounds):  # In turn: a busy machine slows all runs down by the same share.
        for count in processes:
            found[count].append(_measure_once(count, steps, sets))
    cores = usable_cores()
    speed = {n: statistics.median(once["images_per_s"] for once in rounds) for n, rounds in found.items()}
    fewest = processes[0]
    speed_of_one = speed[fewest] / min(fewest, cores)
    seconds = {n: n * batch_size / speed[n] for n in processes}
    model = fit_step_seconds(seconds, cores, gradient_bytes(backbone))
    return {
        "cores": cores,
        "processes": {
            n: {
                "images_per_s": speed[n],
                "images_per_s_of_the_model": n * batch_size / model[n],
                "efficiency": speed[n] / (speed_of_one * min(n, cores)),
                "collectives": statistics.median(once["share_of_time"]["collectives"] for once in rounds),
            }
            for n, rounds in found.items()
        },
    }


def _measure_once(processes: int, steps: int, sets: list[str]) -> dict[str, Any]:
    """Run `facetrain bench train` on some processes; return its numbers for synthetic images."""
    # `env` sets the variable: the environment of this process belongs to facetrain.distributed.
    command = [
        "env",
        "OMP_NUM_THREADS=1",
        sys.executable,
        "-m",
        "facetrain",
        *arguments(processes, steps, sets),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout)["inputs"]["synthetic"])


def arguments(processes: int, steps: int, sets: list[str]) -> list[str]:
    """Return the arguments of facetrain that measure some processes."""
    words = ["bench", "train", "--json", "--nproc-per-node", str(processes), "--steps", str(steps)]
    return [
        *words,
        "--rounds",
        "1",
        *(word for value in ("train.device=cpu", *sets) for word in ("--set", value)),
    ]


def fit_step_seconds(seconds: dict[int, float], cores: int, gradient_bytes: int) -> dict[int, float]:
    """Return the model's seconds per step for each number of processes, fitted by least squares.

    n processes on c cores take t · max(n / c, 1) + 2 (n − 1) / n · gradient_bytes / r, where the second term
    is the all-reduce over a ring (each rank sends that share of the message) and t and r are fitted.
    """
    terms = np.array([[max(n / cores, 1), 2 * (n - 1) / n * gradient_bytes] for n in seconds])
    # Relative errors count: a step of four processes takes twice as long as one of two.
    measured = np.array(list(seconds.values()))
    fitted, *_ = np.linalg.lstsq(terms / measured[:, None], np.ones(len(measured)), rcond=None)
    return dict(zip(seconds, (terms @ fitted).tolist(), strict=True))


def gradient_bytes(backbone: str) -> int:
    """Return the bytes of a backbone's gradients, which DDP exchanges in each step: float32."""
    return sum(4 * parameter.numel() for parameter in build_on_meta(backbone).parameters())


if __name__ == "__main__":
    run(measure_scaling)
