"""Head benchmark: time and memory of full steps compared with plain PyTorch implementations of the same algorithm.

A step is forward pass, backward pass and update: embeddings in, their gradient and updated centers out. Each
variant runs in its own process, because its peak of resident memory (VmHWM) is the peak of
a whole process.
"""

# B local batch   D embedding   K classes   S sampled of K

from __future__ import annotations

import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.bench.machine_peak import synchronize
from facetrain.bench.workloads import HeadWorkload, result_of
from facetrain.distributed import collectives
from facetrain.distributed.spawn import HelperContext
from facetrain.distributed.world import World
from facetrain.errors import UsageError
from facetrain.files import os_errors_as
from facetrain.head.head_run import HeadRun
from facetrain.head.margin_head import MarginHead
from facetrain.head.settings import HeadSettings, MarginSettings
from facetrain.optim.settings import OptimSettings
from facetrain.progress import ProgressCallback, ignore_progress
from facetrain.run.build.head import product_dtype
from facetrain.telemetry.log import warn
from facetrain.training.choose_kernels import choose_head_kernels

# The published ArcFace recipe (arcface_torch's configs), the same for every variant.
SCALE, MARGIN, MOMENTUM, WEIGHT_DECAY, LR = 64.0, 0.5, 0.9, 5e-4, 0.1

HEAD_VARIANTS: dict[str, dict[str, Any]] = {
    "head_fp32": {},
    "head_bf16": {"precision": "bf16"},
    "head_bf16_stored16": {"precision": "bf16", "weight_dtype": "bfloat16", "momentum_dtype": "bfloat16"},
    "head_bf16_stored8": {"precision": "bf16", "weight_dtype": "bfloat16", "momentum_dtype": "int8"},
    "head_fp16": {"precision": "fp16"},
    "head_fp16_stored16": {"precision": "fp16", "weight_dtype": "bfloat16", "momentum_dtype": "bfloat16"},
    "head_sampled": {"sample_rate": 0.1},
    "head_sampled_bf16": {"sample_rate": 0.1, "precision": "bf16"},
    "head_sampled_1pct": {"sample_rate": 0.01},
    "head_sampled_1pct_disk": {"sample_rate": 0.01, "placement": "disk"},
}
"""facetrain's head: keys of the config's section `head`, and the precision of the matrix products. With fp16, a GPU
multiplies in bfloat16 if it can."""
PLAIN_VARIANTS: dict[str, dict[str, Any]] = {
    "plain_fp32": {},
    "plain_bf16": {"autocast": torch.bfloat16},
    "plain_fp16": {"autocast": torch.float16},
    "plain_sampled": {"sample_rate": 0.1},
}
"""Options of PlainHeadStep."""
VARIANTS = [*PLAIN_VARIANTS, *HEAD_VARIANTS]
DEFAULT_VARIANTS = [name for name in VARIANTS if "1pct" not in name and "fp16" not in name]
"""All variants except fp16, which is for GPUs, and except a sample rate of 1 %, which needs more classes than
fit in a short run."""


class PlainHeadStep:
    """Step of arcface_torch's algorithm, written directly: all logits at once, autograd, dense SGD."""

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        device: str,
        *,
        sample_rate: float = 1.0,
        autocast: torch.dtype | None = None,
    ) -> None:
        weight_KD = torch.empty(num_classes, embedding_size, device=device).normal_(0, 0.01)
        self._weight = torch.nn.Parameter(weight_KD)
        self._optimizer = torch.optim.SGD([self._weight], lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        self._sample_rate, self._autocast = sample_rate, autocast

    def __call__(self, embedding_BD: Tensor, label_B: Tensor) -> None:
        """Take one step with embeddings (B, D), float32, and labels (B,), int64."""
        weight: Tensor = self._weight
        if self._sample_rate < 1:
            # Partial FC: positive classes get the highest score, so they are always in the sample.
            score = torch.rand(len(weight), device=weight.device)
            score[label_B] = 2
            index_S = score.topk(int(self._sample_rate * len(weight))).indices.sort().values
            weight, label_B = weight[index_S], torch.searchsorted(index_S, label_B)
        with torch.autocast(embedding_BD.device.type, self._autocast, enabled=self._autocast is not None):
            cos_BK = F.linear(F.normalize(embedding_BD), F.normalize(weight)).float().clamp(-1, 1)
        target = torch.arange(len(label_B), device=label_B.device), label_B
        with torch.no_grad():  # arcface_torch does not differentiate the margin
            cos_BK[target] = (cos_BK[target].arccos() + MARGIN).cos()
        F.cross_entropy(cos_BK * SCALE, label_B).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


class MarginHeadStep:
    """Step of facetrain's head."""

    def __init__(
        self, num_classes: int, embedding_size: int, device: str, folder: Path, **options: Any
    ) -> None:
        dtype = product_dtype(options.pop("precision", "fp32"), torch.device(device))
        margin = MarginSettings(scale=SCALE, m2=MARGIN, gradient="straight_through")
        ranks = collectives.world_size()
        self._head = MarginHead(
            HeadSettings(margin=margin, **options),
            OptimSettings(momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
            HeadRun(folder=folder, product_dtype=dtype),
            World(collectives.rank(), 0, ranks, ranks, torch.device(device)),
            embedding_size=embedding_size,
            num_classes=num_classes,
        )
        if reason := choose_head_kernels([self._head], torch.device(device)):
            warn(f"the head runs without its kernels: {reason}")
        self._steps_taken = 0

    def __call__(self, embedding_BD: Tensor, label_B: Tensor) -> None:
        """Take one step with embeddings (B, D), float32, and labels (B,), int64. Collective."""
        self._head.begin_step(self._steps_taken, lr=LR)
        self._head(embedding_BD, label_B).backward()
        self._steps_taken += 1


def measure_head_steps(
    variants: Sequence[str],
    workload: HeadWorkload,
    progress: ProgressCallback = ignore_progress,
) -> dict[str, dict[str, Any]]:
    """Return a report of each variant, with its ratio to each plain variant. `progress` counts the variants.

    Raises:
        UsageError: `disk` is not a folder and cannot be created, or a plain variant's sample cannot hold a batch.
        RunError: a variant failed, for example because memory ran out.
    """
    for variant in variants:
        _require_room_for_batch(variant, workload)
    if workload.disk is not None:
        with os_errors_as(UsageError, workload.disk, "name a folder on the disk to measure"):
            workload.disk.mkdir(parents=True, exist_ok=True)
    reports: dict[str, dict[str, Any]] = {}
    for variant in variants:
        what = f"bench head: variant {variant} with {workload.identities:,} identities"
        with ProcessPoolExecutor(1, HelperContext()) as process:
            reports[variant] = result_of(process, what, measure_variant, variant, workload)
        progress(len(reports), len(variants))
    for report in reports.values():
        report["times_faster_than"] = {
            plain: round(reports[plain]["step_s"] / report["step_s"], 2)
            for plain in PLAIN_VARIANTS
            if plain in reports
        }
    return reports


def _require_room_for_batch(variant: str, workload: HeadWorkload) -> None:
    num_classes, batch_size = workload.identities, workload.batch_size
    rate = PLAIN_VARIANTS.get(variant, {}).get("sample_rate", 1.0)
    # facetrain's head grows the sample to hold the batch; the plain one has a fixed size.
    if rate < 1 and int(rate * num_classes) < batch_size:
        raise UsageError(
            f"bench head: variant {variant} samples {100 * rate:.0f} % of {num_classes:,} identities, which cannot "
            f"hold a batch of {batch_size:,}; use --identities {math.ceil(batch_size / rate)} or more, a smaller "
            "--batch-size or another --variant"
        )


def measure_variant(variant: str, workload: HeadWorkload) -> dict[str, Any]:
    """Return times and peak of memory of one variant's steps, measured in this process."""
    classes, size, device = workload.identities, workload.embedding_size, workload.device
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step: Callable[[Tensor, Tensor], None]
    with tempfile.TemporaryDirectory(dir=workload.disk) as folder:
        if variant in PLAIN_VARIANTS:
            step = PlainHeadStep(classes, size, device, **PLAIN_VARIANTS[variant])
        else:
            step = MarginHeadStep(classes, size, device, Path(folder), **HEAD_VARIANTS[variant])
        torch.manual_seed(0)
        seconds, cpu_seconds = [], []
        for _ in range(workload.steps + 1):
            embedding = torch.randn(workload.batch_size, size, device=device, requires_grad=True)
            label = torch.randint(0, classes, (workload.batch_size,), device=device)
            synchronize(embedding.device)
            start, cpu_start = time.perf_counter(), time.process_time()
            step(embedding, label)
            synchronize(embedding.device)
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else _peak_bytes()
    # The first step allocates memory, so it is left out.
    return {
        "step_s": round(statistics.median(seconds[1:]), 4),
        # Of all threads together. With OMP_NUM_THREADS=1 it is the number that other programs disturb least.
        "cpu_s": round(min(cpu_seconds[1:]), 4),
        "peak_bytes": peak,
        "peak_over_fp32_centers_and_momentum": round(peak / (classes * size * 8), 3),
    }


def _peak_bytes() -> int:
    """Return the largest resident memory of this process so far; 0 where /proc does not have it."""
    # Not getrusage: its peak includes the peak of the parent process, from which this one was forked.
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(peak[1]) * 1024 if peak else 0
