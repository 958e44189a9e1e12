"""The head beside a plain PyTorch implementation of the same algorithm: time and memory of one full step.

A step is forward, backward and update: embeddings in, their gradient and moved centers out. Each way runs
in a process of its own (this module's), whose peak of resident memory (VmHWM) is read when it ends.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.config.schema import HeadConfig, OptimConfig
from facetrain.distributed import collectives
from facetrain.errors import RunError, UsageError
from facetrain.head.margin_head import MarginHead
from facetrain.head.margins import CombinedMargin
from facetrain.run.build_head import head_settings, optimizer_settings

SCALE, MARGIN, MOMENTUM, DECAY, LR = 64.0, 0.5, 0.9, 5e-4, 0.1
_BF16 = torch.bfloat16

HEADS: dict[str, dict[str, Any]] = {
    "head_fp32": {},
    "head_bf16": {"product_dtype": _BF16},
    "head_bf16_stored16": {"product_dtype": _BF16, "weight_dtype": "bfloat16", "momentum_dtype": "bfloat16"},
    "head_bf16_stored8": {"product_dtype": _BF16, "weight_dtype": "bfloat16", "momentum_dtype": "int8"},
    "head_sampled": {"sample_rate": 0.1},
    "head_sampled_bf16": {"sample_rate": 0.1, "product_dtype": _BF16},
    "head_sampled_1pct": {"sample_rate": 0.01},
    "head_sampled_1pct_disk": {"sample_rate": 0.01, "placement": "disk"},
}
PLAIN: dict[str, dict[str, Any]] = {
    "plain_fp32": {},
    "plain_bf16": {"autocast": True},
    "plain_sampled": {"sample_rate": 0.1},
}
WAYS = [*PLAIN, *HEADS]
USUAL = [*PLAIN, *list(HEADS)[:6]]
"""What is compared where nothing is chosen."""


class PlainHead:
    """All logits, autograd, dense SGD: the published algorithm as one writes it down (arcface_torch's way)."""

    def __init__(
        self, num_classes: int, size: int, device: str, *, sample_rate: float = 1.0, autocast: bool = False
    ) -> None:
        self._weight = torch.nn.Parameter(torch.empty(num_classes, size, device=device).normal_(0, 0.01))
        self._optimizer = torch.optim.SGD([self._weight], lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        self._rate, self._autocast = sample_rate, autocast

    def step(self, embedding_BD: Tensor, label_B: Tensor) -> None:
        """Go forward and backward, and update."""
        weight: Tensor = self._weight
        if self._rate < 1:
            score = torch.rand(len(weight), device=weight.device)
            score[label_B] = 2
            index_S = score.topk(int(self._rate * len(weight))).indices.sort().values
            weight, label_B = weight[index_S], torch.searchsorted(index_S, label_B)
        with torch.autocast(embedding_BD.device.type, _BF16, enabled=self._autocast):
            cos_BK = F.linear(F.normalize(embedding_BD), F.normalize(weight)).float().clamp(-1, 1)
        own = torch.arange(len(label_B), device=label_B.device), label_B
        with torch.no_grad():
            cos_BK[own] = (cos_BK[own].arccos() + MARGIN).cos()
        F.cross_entropy(cos_BK * SCALE, label_B).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


class OurHead:
    """The head, with the same step."""

    def __init__(self, num_classes: int, size: int, device: str, folder: Path, **options: Any) -> None:
        product_dtype = options.pop("product_dtype", None)
        self._head = MarginHead(
            head_settings(HeadConfig(**options), folder=folder, product_dtype=product_dtype),
            optimizer_settings(OptimConfig(momentum=MOMENTUM, weight_decay=DECAY)),
            CombinedMargin(SCALE, m2=MARGIN, straight_through=True),
            embedding_size=size,
            num_classes=num_classes,
            rank=collectives.rank(),
            world_size=collectives.world_size(),
            device=torch.device(device),
        )
        self._head.lr = LR
        self._count = 0

    def step(self, embedding_BD: Tensor, label_B: Tensor) -> None:
        """Go forward and backward, and update."""
        self._head.begin_step(self._count)
        self._head(embedding_BD, label_B).backward()
        self._count += 1


def measure_ways(
    ways: Sequence[str],
    num_classes: int,
    *,
    embedding_size: int = 512,
    batch_size: int = 256,
    steps: int = 5,
    device: str = "cpu",
    disk: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield what each way took, one after the other, each in a process of its own.

    Raises:
        UsageError: `disk` is no folder, and none can be made there.
        RunError: a way could not be measured: there may be too little memory for it.
    """
    if disk is not None:
        try:
            disk.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{disk}: {error.strerror}; name a folder on the disk to measure") from error
    for way in ways:
        command = [
            *(sys.executable, "-m", "facetrain.bench.head", way, str(num_classes)),
            *map(str, (embedding_size, batch_size, steps, device)),
        ]
        done = subprocess.run(command + ([str(disk)] if disk else []), capture_output=True, text=True)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
            raise RunError(
                f"{way} at {num_classes:,} identities could not be measured: {last}; "
                "take fewer identities or another way"
            )
        yield json.loads(done.stdout)


def with_ratios(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add how many times faster than each plain way at the same number of identities a report is."""
    time_of = {(r["way"], r["classes"]): (r["step_s"], r["cpu_s"]) for r in reports}
    for report in reports:
        for plain in PLAIN:
            if (plain, report["classes"]) in time_of:
                step_s, cpu_s = time_of[plain, report["classes"]]
                report[f"times_faster_than_{plain}"] = round(step_s / report["step_s"], 2)
                report[f"times_less_cpu_than_{plain}"] = round(cpu_s / report["cpu_s"], 2)
    return reports


def _measure(
    way: str, classes: int, size: int, batch: int, steps: int, device: str, disk: Path | None
) -> dict[str, Any]:
    """Time the steps of one way, after one that allocates, and read the process's peak memory."""
    started_bytes = _peak_bytes()
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        if way in PLAIN:
            step: Callable[..., None] = PlainHead(classes, size, device, **PLAIN[way]).step
        else:
            step = OurHead(classes, size, device, Path(folder), **HEADS[way]).step
        torch.manual_seed(0)
        seconds, cpu_seconds = [], []
        for _ in range(steps + 1):
            embedding = torch.randn(batch, size, device=device, requires_grad=True)
            label = torch.randint(0, classes, (batch,), device=device)
            _finish(device)
            since, cpu_since = time.perf_counter(), time.process_time()
            step(embedding, label)
            _finish(device)
            seconds.append(time.perf_counter() - since)
            cpu_seconds.append(time.process_time() - cpu_since)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else _peak_bytes()
    return {
        "way": way,
        "classes": classes,
        "step_s": round(statistics.median(seconds[1:]), 4),
        "fastest_s": round(min(seconds[1:]), 4),
        # Of all threads together: with OMP_NUM_THREADS=1, the measure that other programs disturb least.
        "cpu_s": round(min(cpu_seconds[1:]), 4),
        "peak_bytes": peak,
        "peak_above_start_bytes": peak if device == "cuda" else peak - started_bytes,
        "peak_over_fp32_centers_and_momentum": round(peak / (classes * size * 8), 3),
    }


def _finish(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def _peak_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    for name in ("classes", "size", "batch", "steps"):
        parser.add_argument(name, type=int)
    parser.add_argument("device")
    parser.add_argument("disk", type=Path, nargs="?")
    print(json.dumps(_measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    _main()
