"""The head beside a plain PyTorch implementation of the same algorithm: time and memory of one full step.

    python -m benchmarks.head                          every way at 1 million identities
    python -m benchmarks.head --sizes 1e5 1e6          several sizes
    python -m benchmarks.head --ways head_bf16_stored8 --sizes 1e7
    python -m benchmarks.head --ranks 2                bytes that a rank sends in a step, at two sizes

A step is forward, backward and update: embeddings in, their gradient and moved centres out. Each way runs
in a process of its own, whose peak of resident memory (VmHWM) is read when it ends.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.distributed import collectives
from facetrain.head.margin import Margin
from facetrain.head.margin_head import MarginHead
from tests.support.ranks import run_ranks

SCALE, MARGIN, MOMENTUM, DECAY, LR = 64.0, 0.5, 0.9, 5e-4, 0.1
BF16, FP32 = torch.bfloat16, torch.float32

HEADS: dict[str, dict[str, Any]] = {
    "head_fp32": {},
    "head_bf16": {"product_dtype": BF16},
    "head_bf16_stored16": {"product_dtype": BF16, "weight_dtype": BF16, "momentum_dtype": BF16},
    "head_bf16_stored8": {"product_dtype": BF16, "weight_dtype": BF16, "momentum_dtype": torch.int8},
    "head_sampled": {"sample_rate": 0.1},
    "head_sampled_bf16": {"sample_rate": 0.1, "product_dtype": BF16},
    "head_sampled_1pct": {"sample_rate": 0.01},
    "head_sampled_1pct_disk": {"sample_rate": 0.01, "placement": "disk", "sample_block": 8},
}
PLAIN: dict[str, dict[str, Any]] = {
    "plain_fp32": {},
    "plain_bf16": {"autocast": True},
    "plain_sampled": {"sample_rate": 0.1},
}


class PlainHead:
    """All logits, autograd, dense SGD: the published algorithm as one writes it down (arcface_torch's way)."""

    def __init__(
        self, num_classes: int, size: int, device: str, *, sample_rate: float = 1.0, autocast: bool = False
    ):
        self.weight = torch.nn.Parameter(torch.empty(num_classes, size, device=device).normal_(0, 0.01))
        self.optimizer = torch.optim.SGD([self.weight], lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        self.rate, self.autocast = sample_rate, autocast

    def step(self, embedding_BD: Tensor, label_B: Tensor) -> None:
        """Go forward and backward, and update."""
        weight = self.weight
        if self.rate < 1:
            score = torch.rand(len(weight), device=weight.device)
            score[label_B] = 2
            index_S = score.topk(int(self.rate * len(weight))).indices.sort().values
            weight, label_B = weight[index_S], torch.searchsorted(index_S, label_B)
        with torch.autocast(embedding_BD.device.type, BF16, enabled=self.autocast):
            cos_BK = F.linear(F.normalize(embedding_BD), F.normalize(weight)).float().clamp(-1, 1)
        own = torch.arange(len(label_B), device=label_B.device), label_B
        with torch.no_grad():
            cos_BK[own] = (cos_BK[own].arccos() + MARGIN).cos()
        F.cross_entropy(cos_BK * SCALE, label_B).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class OurHead:
    """The head, with the same step."""

    def __init__(self, num_classes: int, size: int, device: str, folder: Path, **options: Any):
        self.head = MarginHead(
            embedding_size=size,
            num_classes=num_classes,
            margin=Margin(scale=SCALE, m2=MARGIN, straight_through=True),
            rank=collectives.rank(),
            world_size=collectives.world_size(),
            momentum=MOMENTUM,
            weight_decay=DECAY,
            folder=folder,
            device=torch.device(device),
            **options,
        )
        self.head.lr = LR
        self.count = 0

    def step(self, embedding_BD: Tensor, label_B: Tensor) -> None:
        """Go forward and backward, and update."""
        self.head.begin_step(self.count)
        self.head(embedding_BD, label_B).backward()
        self.count += 1


def measure(
    way: str, classes: int, size: int, batch: int, steps: int, device: str, disk: Path | None
) -> dict:
    """Time the steps of one way, after one that allocates, and read the process's peak memory."""
    started_bytes = peak_bytes()
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
            finish(device)
            since, cpu_since = time.perf_counter(), time.process_time()
            step(embedding, label)
            finish(device)
            seconds.append(time.perf_counter() - since)
            cpu_seconds.append(time.process_time() - cpu_since)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else peak_bytes()
    return {
        "way": way,
        "classes": classes,
        "step_s": round(statistics.median(seconds[1:]), 4),
        "fastest_s": round(min(seconds[1:]), 4),
        # Of all threads together: with OMP_NUM_THREADS=1, the measure that other programs disturb least.
        "cpu_s": round(min(cpu_seconds[1:]), 4),
        "peak_bytes": peak,
        "peak_above_start_bytes": peak if device == "cuda" else peak - started_bytes,
        "peak_over_fp32_centres_and_momentum": round(peak / (classes * size * 8), 3),
    }


def finish(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


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


def with_ratios(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add how many times faster than the plain way of the same sample each is."""
    time_of = {(r["way"], r["classes"]): r["step_s"] for r in reports}
    cpu_time_of = {(r["way"], r["classes"]): r["cpu_s"] for r in reports}
    for report in reports:
        for plain in PLAIN:
            if (plain, report["classes"]) in time_of:
                ratio = time_of[plain, report["classes"]] / report["step_s"]
                report[f"times_faster_than_{plain}"] = round(ratio, 2)
                cpu_ratio = cpu_time_of[plain, report["classes"]] / report["cpu_s"]
                report[f"times_less_cpu_than_{plain}"] = round(cpu_ratio, 2)
    return reports


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", default=list(PLAIN) + list(HEADS)[:6], choices=[*PLAIN, *HEADS])
    parser.add_argument("--sizes", nargs="+", type=float, default=[1e6], help="numbers of identities")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--embedding-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--disk", type=Path, help="folder on the disk to measure, for centres on disk")
    parser.add_argument(
        "--ranks", type=int, help="measure the traffic between so many gloo processes instead"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_args(argv)
    if o.ranks:
        print(json.dumps(measure_traffic(o.ranks, o.embedding_size, o.batch_size // o.ranks), indent=1))
        return
    if o.here:
        print(
            json.dumps(
                measure(o.ways[0], int(o.sizes[0]), o.embedding_size, o.batch_size, o.steps, o.device, o.disk)
            )
        )
        return
    reports = []
    for classes in o.sizes:
        for way in o.ways:
            rest = [
                f"--batch-size={o.batch_size}",
                f"--embedding-size={o.embedding_size}",
                f"--steps={o.steps}",
            ]
            rest += [f"--device={o.device}"] + ([f"--disk={o.disk}"] if o.disk else [])
            command = [
                sys.executable,
                "-m",
                "benchmarks.head",
                "--here",
                "--ways",
                way,
                "--sizes",
                str(classes),
                *rest,
            ]
            reports.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
            print(json.dumps(reports[-1]), file=sys.stderr)
    print(json.dumps({"torch": torch.__version__, "reports": with_ratios(reports)}, indent=1))


if __name__ == "__main__":
    main()
