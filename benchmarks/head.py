"""Head benchmark: time and memory of full steps, by number formats, sample rates and placements.

A step is forward pass, backward pass and update: embeddings in, their gradient and updated centers out. Each
variant runs in its own process, because its peak of resident memory (VmHWM) is the peak of
a whole process.
"""

# B local batch   D embedding

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import in_new_process, memory_bytes, run
from facetrain.bench.machine_peak import synchronize
from facetrain.distributed import collectives
from facetrain.distributed.world import World
from facetrain.head.build import HeadRun, build_head
from facetrain.head.settings import HeadSettings, MarginSettings
from facetrain.optim.settings import OptimSettings
from facetrain.run.parts.head import product_dtype
from facetrain.telemetry.log import warn
from facetrain.training.choose_kernels import choose_head_kernels

# The published ArcFace recipe (arcface_torch's configs), the same for every variant.
SCALE, MARGIN, MOMENTUM, WEIGHT_DECAY, LR = 64.0, 0.5, 0.9, 5e-4, 0.1

VARIANTS: dict[str, dict[str, Any]] = {
    "head_fp32": {},
    "head_bf16": {"precision": "bf16"},
    "head_bf16_stored16": {"precision": "bf16", "weight_dtype": "bfloat16", "momentum_dtype": "bfloat16"},
    "head_bf16_stored8": {"precision": "bf16", "weight_dtype": "bfloat16", "momentum_dtype": "int8"},
    "head_bf16_stored16_long": {
        "precision": "bf16",
        "weight_dtype": "bfloat16",
        "momentum_dtype": "bfloat16",
        "chunk_size": 1 << 18,
    },
    "head_fp16": {"precision": "fp16"},
    "head_fp16_stored16": {"precision": "fp16", "weight_dtype": "bfloat16", "momentum_dtype": "bfloat16"},
    "head_sampled": {"sample_rate": 0.1},
    "head_sampled_bf16": {"sample_rate": 0.1, "precision": "bf16"},
    "head_sampled_1pct": {"sample_rate": 0.01},
    "head_sampled_1pct_disk": {"sample_rate": 0.01, "placement": "disk"},
}
"""facetrain's head: keys of the config's section `head`, and the precision of the matrix products. With fp16, a GPU
multiplies in bfloat16 if it can."""
DEFAULT_VARIANTS = [
    name for name in VARIANTS if "1pct" not in name and "fp16" not in name and "long" not in name
]
"""All variants except fp16 and long chunks, which are for GPUs, and except a sample rate of 1 %, which needs more
classes than fit in a short run."""
BASELINE = "head_fp32"
"""Variant with which the others are compared."""


@dataclass(frozen=True)
class HeadWorkload:
    """Sizes that all variants of a head's step have in common."""

    identities: int = 1_000_000
    """Class centers; a million need 14 GB of memory."""
    batch_size: int = 256
    """Embeddings per step."""
    embedding_size: int = 512
    """Numbers per embedding."""
    steps: int = 5
    """Timed steps of each variant; one more allocates, and is not counted."""
    device: str = "cpu"
    disk: Path | None = None
    """Folder for centers on disk; None: the folder for temporary files."""
    recompute: str = "auto"
    """`head.recompute`; with `auto`, the exponentials that are kept are a part of the peak."""


class MarginHeadStep:
    """Step of facetrain's head."""

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        device: str,
        *,
        folder: Path,
        batch: int = 256,
        **options: Any,
    ) -> None:
        dtype = product_dtype(options.pop("precision", "fp32"), torch.device(device))
        margin = MarginSettings(scale=SCALE, m2=MARGIN, gradient="straight_through")
        ranks = collectives.world_size()
        self._head = build_head(
            HeadSettings(margin=margin, **options),
            OptimSettings(momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
            HeadRun(folder=folder, product_dtype=dtype),
            World(collectives.rank(), 0, ranks, ranks, torch.device(device)),
            embedding_size=embedding_size,
            num_classes=num_classes,
        )
        if reason := choose_head_kernels([self._head], torch.device(device), batch * ranks):
            warn(f"the head runs without its kernels: {reason}")
        self._steps_taken = 0

    def __call__(self, embedding_BD: Tensor, label_B: Tensor) -> None:
        """Take one step with embeddings (B, D), float32, and labels (B,), int64. Collective."""
        self._head.begin_step(self._steps_taken, lr=LR)
        self._head(embedding_BD, label_B).backward()
        self._steps_taken += 1


def measure_heads(
    variant: list[str] = DEFAULT_VARIANTS,
    identities: int = 1_000_000,
    batch_size: int = 256,
    embedding_size: int = 512,
    steps: int = 5,
    device: str = "cpu",
    disk: Path | None = None,
    recompute: str = "auto",
) -> dict[str, dict[str, Any]]:
    """Return a report of each variant, with its ratio to `BASELINE`."""
    workload = HeadWorkload(identities, batch_size, embedding_size, steps, device, disk, recompute)
    reports = {name: in_new_process(measure_variant, name, workload) for name in variant}
    if BASELINE in reports:
        for report in reports.values():
            report[f"times_{BASELINE}"] = round(reports[BASELINE]["step_s"] / report["step_s"], 2)
    return reports


def measure_variant(variant: str, workload: HeadWorkload) -> dict[str, Any]:
    """Return times and peak of memory of one variant's steps, measured in this process."""

    def build(*sizes: Any) -> MarginHeadStep:
        return MarginHeadStep(*sizes, folder=Path(folder), batch=workload.batch_size, **options)

    options = {"recompute": workload.recompute} | VARIANTS[variant]
    with tempfile.TemporaryDirectory(dir=workload.disk) as folder:
        return measure_steps(build, workload)


def measure_steps(
    build: Callable[[int, int, str], Callable[[Tensor, Tensor], None]], workload: HeadWorkload
) -> dict[str, Any]:
    """Return times and peak of memory of steps; `build` takes classes, embedding size and device."""
    classes, size, device = workload.identities, workload.embedding_size, workload.device
    # Of a small head: the code of PyTorch that a step loads needs 60 MB, whatever the classes.
    _time_steps(build(min(classes, 4096), size, device), replace(workload, identities=min(classes, 4096)), 1)
    if device == "cuda":
        before = torch.cuda.memory_allocated()
    else:
        # Or memory that the small head has freed, and that the C library keeps, would be taken off the peak.
        ctypes.CDLL(None).malloc_trim(0)
        before = memory_bytes("VmRSS")
    step = build(classes, size, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # now: the build compares the kernels with PyTorch's operations
    seconds, cpu_seconds = _time_steps(step, workload, workload.steps + 1)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else memory_bytes()
    peak -= before
    # The first step allocates memory, so it is left out.
    return {
        "step_s": round(statistics.median(seconds[1:]), 4),
        # Of all threads together. With OMP_NUM_THREADS=1 it is the number that other programs disturb least.
        "cpu_s": round(min(cpu_seconds[1:]), 4),
        "peak_bytes": peak,
        "peak_over_fp32_centers_and_momentum": round(peak / (classes * size * 8), 3),
    }


def _time_steps(
    step: Callable[[Tensor, Tensor], None], workload: HeadWorkload, count: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of each step, and the CPU seconds."""
    torch.manual_seed(0)
    seconds, cpu_seconds = [], []
    for _ in range(count):
        embedding = torch.randn(
            workload.batch_size, workload.embedding_size, device=workload.device, requires_grad=True
        )
        label = torch.randint(0, workload.identities, (workload.batch_size,), device=workload.device)
        synchronize(embedding.device)
        start, cpu_start = time.perf_counter(), time.process_time()
        step(embedding, label)
        synchronize(embedding.device)
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    return seconds, cpu_seconds


if __name__ == "__main__":
    run(measure_heads)
