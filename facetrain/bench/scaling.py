"""Weak scaling benchmark: whole steps on 1, 2 and 4 processes, the same batch on each.

Each process has one thread. Processes in excess of the cores share them, so the ideal speed is that of one
process times the cores in use. Each result is compared with a model of two numbers fitted to all of them: the
seconds that a core needs for a step, and the bytes per second at which gradients are exchanged.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.backbone.zoo import build_on_meta
from facetrain.cpu_cores import usable_cores
from facetrain.errors import RunError, UsageError
from facetrain.files import os_errors_as


@dataclass(frozen=True)
class ScalingSettings:
    """Settings of all measured runs."""

    processes: Sequence[int]
    backbone: str
    local_batch: int
    """Images per process and step."""
    steps: int
    rounds: int
    results: Path | None = None
    """File to which each result is appended, and from which a repeated call goes on."""
    overrides: Sequence[str] = ()
    """Further values of the config, as KEY=VALUE."""


def measure_scaling(settings: ScalingSettings) -> dict[str, Any]:
    """Return images per second, efficiency and share of time in collectives for each number of processes.

    Raises:
        RunError: a run failed.
        UsageError: the file of results cannot be read or written.
    """
    found = measure_all(settings)
    cores = usable_cores()
    speed = {n: statistics.median(once["images_per_s"] for once in rounds) for n, rounds in found.items()}
    fewest = settings.processes[0]
    speed_of_one = speed[fewest] / min(fewest, cores)
    seconds = {n: n * settings.local_batch / speed[n] for n in settings.processes}
    model = fit_step_seconds(seconds, cores, gradient_bytes(settings.backbone))
    return {
        "cores": cores,
        "processes": {
            n: {
                "images_per_s": speed[n],
                "images_per_s_of_the_model": n * settings.local_batch / model[n],
                "efficiency": speed[n] / (speed_of_one * min(n, cores)),
                "collectives": statistics.median(once["share_of_time"]["collectives"] for once in rounds),
            }
            for n, rounds in found.items()
        },
    }


def measure_all(settings: ScalingSettings) -> dict[int, list[dict[str, Any]]]:
    """Measure in rounds; skip what the file of results already has."""
    found: dict[int, list[dict[str, Any]]] = {processes: [] for processes in settings.processes}
    for once in _saved_results(settings.results):
        if once["processes"] in found:
            found[once["processes"]].append(once)
    for number in range(settings.rounds):  # In turn: a busy machine slows all runs down by the same share.
        for processes in settings.processes:
            if len(found[processes]) > number:
                continue
            once = {"processes": processes} | _measure_once(processes, settings)
            found[processes].append(once)
            if settings.results:
                with os_errors_as(UsageError, settings.results), settings.results.open("a") as file:
                    file.write(json.dumps(once) + "\n")
    return found


def _saved_results(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    try:
        with os_errors_as(UsageError, path):
            found = [json.loads(line) for line in path.read_text().splitlines()]
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {error}; it must be a file that `bench scaling` wrote") from error
    for number, once in enumerate(found, start=1):
        if not _is_result(once):
            raise UsageError(
                f"{path}, line {number}: is not a result; it must be a file that `bench scaling` wrote"
            )
    return found


def _is_result(once: Any) -> bool:
    """Return whether a value has the numbers that a report takes from a result."""
    try:
        numbers = once["processes"], once["images_per_s"], once["share_of_time"]["collectives"]
    except (TypeError, KeyError, IndexError):
        return False
    return (
        all(type(number) in (int, float) and math.isfinite(number) for number in numbers) and numbers[1] > 0
    )


def _measure_once(processes: int, settings: ScalingSettings) -> dict[str, Any]:
    """Run `facetrain bench train` on some processes; return its numbers for synthetic images."""
    sets = (
        f"model.backbone={settings.backbone}",
        f"train.batch_size={settings.local_batch}",
        "train.device=cpu",
    )
    # `env` sets the variable: the environment of this process belongs to facetrain.distributed.
    command = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "facetrain", "bench", "train", "--json"]
    command += ["--input", "synthetic", "--nproc-per-node", str(processes)]
    command += ["--steps", str(settings.steps), "--rounds", "1"]
    command += [word for value in (*sets, *settings.overrides) for word in ("--set", value)]
    done = subprocess.run(command, stdout=subprocess.PIPE)
    if done.returncode != 0:
        raise RunError(
            f"bench scaling: the run on {processes} processes ended with exit code {done.returncode}; "
            "its message is above"
        )
    found: dict[str, Any] = json.loads(done.stdout)["inputs"]["synthetic"]
    return found


def fit_step_seconds(seconds: dict[int, float], cores: int, gradient_bytes: int) -> dict[int, float]:
    """Return the model's seconds per step for each number of processes, fitted by least squares.

    n processes on c cores take t · max(n / c, 1) + 2 (n − 1) / n · gradient_bytes / r, where the second term
    is the all-reduce over a ring (each rank sends that share of the message) and t and r are fitted.
    """
    terms = np.array([[max(n / cores, 1), 2 * (n - 1) / n * gradient_bytes] for n in seconds])
    # Relative errors count: a step of four processes takes twice as long as one of two.
    measured = np.array(list(seconds.values()))
    found, *_ = np.linalg.lstsq(terms / measured[:, None], np.ones(len(measured)), rcond=None)
    return dict(zip(seconds, (terms @ found).tolist(), strict=True))


def gradient_bytes(backbone: str) -> int:
    """Return the bytes of a backbone's gradients, which DDP exchanges in each step: float32."""
    return sum(4 * parameter.numel() for parameter in build_on_meta(backbone).parameters())
