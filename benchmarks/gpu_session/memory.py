"""Jobs of a GPU session that measure memory: peaks of whole steps, and the largest head that fits."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_session import expected
from benchmarks.gpu_session.rows import Rows, row
from facetrain.bench.generated_dataset import open_or_generate
from facetrain.bench.machine_peak import synchronize
from facetrain.bench.train import build_run, repeated_batch
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.distributed.world import join
from facetrain.telemetry.memory import peak_gib

_SEARCHED_PART = 0.3
"""The limit of identities is searched this far below and above the forecast."""
_REHEARSED_IDENTITIES, _REHEARSED_LIMIT = 4000, 3500
"""Expected and actual limit of a rehearsal, where no memory ends."""


def measure_memory(config: dict[str, Any], device: str, identities: int, failures: list[str]) -> Rows:
    """Yield the peak of allocated memory of whole steps."""
    described = expected.run_config(config, device)
    with open_or_generate(None, image_size=described.data.image_size, num_images=128) as source:
        peak = _take_steps(described, identities, source)
    needed = expected.expected_peak(described, identities) / 2**30
    what = ", ".join(f"{key}: {value}" for key, value in config.items())
    yield row(f"{what}, {identities:,} identities", "GiB at most", peak, needed)


def _take_steps(config: Config, identities: int, source: FaceDataset, steps: int = 3) -> float:
    """Take whole steps of a run; return the peak of allocated memory in GiB, without the first step.

    In the first step cuDNN tries its algorithms, whose workspaces are no part of later steps.
    """
    with (
        join(config.train.device, cpu_setting="train.device: cpu") as world,
        tempfile.TemporaryDirectory() as scratch,
    ):
        run = build_run(config, world, identities, Path(scratch), source)
        batches = repeated_batch(run, identities)
        run.take_steps(batches, 1)
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)
        run.take_steps(batches, steps)
        synchronize(world.device)
        return peak_gib(world.device)


def measure_limit(config: dict[str, Any], device: str, failures: list[str]) -> Rows:
    """Yield the largest number of identities with which a step fits in the device's memory, by bisection."""
    described = expected.run_config(config, device)
    if device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
        planned = expected.most_identities(described, memory)
    else:
        planned = _REHEARSED_IDENTITIES

    with open_or_generate(None, image_size=described.data.image_size, num_images=128) as source:

        def fits(identities: int) -> bool:
            if device == "cpu" and identities > _REHEARSED_LIMIT:
                return False
            try:
                _take_steps(described, identities, source)
            except torch.OutOfMemoryError:
                return False
            finally:
                free_memory()
            return True

        largest = largest_that_fits(planned, fits)
    what = ", ".join(f"{key}: {value}" for key, value in config.items())
    yield row(what, "identities", largest, planned)


def largest_that_fits(planned: int, fits: Callable[[int], bool], trials: int = 6) -> int:
    """Return the largest tried number that fits, near `planned`; 0 if none does."""
    low, high, best = planned * (1 - _SEARCHED_PART), planned * (1 + _SEARCHED_PART), 0
    tried = planned
    for _ in range(trials):
        if fits(tried):
            best, low = tried, tried
        else:
            high = tried
        tried = round((low + high) / 2)
    return best


def free_memory() -> None:
    """Return the memory of tensors that no longer exist to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
