"""Time and memory of full steps of the head, as a module with an optimizer and as in a run, beside plain PyTorch."""

# B local batch   D embedding   K classes   S sampled of K

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import in_new_process, run
from benchmarks.head import (
    LR,
    MARGIN,
    MOMENTUM,
    SCALE,
    WEIGHT_DECAY,
    HeadWorkload,
    measure_steps,
    measure_variant,
)
from facetrain.head.margins.combined import arcface
from facetrain.head.partial_fc import PartialFC

PLAIN_VARIANTS: dict[str, dict[str, Any]] = {
    "plain_fp32": {},
    "plain_bf16": {"autocast": torch.bfloat16},
    "plain_fp16": {"autocast": torch.float16},
    "plain_sampled": {"sample_rate": 0.1},
}
"""Options of PlainHeadStep."""
_RIVALS = {"plain_fp32": "head_fp32", "plain_bf16": "head_bf16", "plain_sampled": "head_sampled"}
"""The same algorithm in `facetrain train`; `PartialFC` in a loop takes the options of the plain variant."""


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


class ModuleStep:
    """Step of `facetrain.PartialFC` with dense SGD, in the same loop."""

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        device: str,
        *,
        sample_rate: float = 1.0,
        autocast: torch.dtype | None = None,
    ) -> None:
        margin = partial(arcface, m2=MARGIN, gradient="straight_through")
        self._head = PartialFC(
            margin, embedding_size, num_classes, sample_rate, autocast is not None, scale=SCALE, device=device
        )
        self._optimizer = torch.optim.SGD(
            self._head.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
        )

    def __call__(self, embedding_BD: Tensor, label_B: Tensor) -> None:
        """Take one step with embeddings (B, D), float32, and labels (B,), int64."""
        self._head(embedding_BD, label_B).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def measure_module(variant: str, workload: HeadWorkload) -> dict[str, Any]:
    """Return times and peak of memory of the module's steps with a plain variant's options."""
    return measure_steps(partial(ModuleStep, **PLAIN_VARIANTS[variant]), workload)


def measure_plain(variant: str, workload: HeadWorkload) -> dict[str, Any]:
    """Return times and peak of memory of a plain variant's steps, measured in this process."""
    return measure_steps(partial(PlainHeadStep, **PLAIN_VARIANTS[variant]), workload)


def measure_heads(
    identities: int = 1_000_000,
    batch_size: int = 256,
    embedding_size: int = 512,
    steps: int = 5,
    device: str = "cpu",
) -> dict[str, Any]:
    """Return a report of each plain variant, of `PartialFC` in a loop and of the head of a run, and their ratios.

    A sample of a tenth must hold the batch.
    """
    workload = HeadWorkload(identities, batch_size, embedding_size, steps, device)
    reports: dict[str, Any] = {}
    for plain, head in _RIVALS.items():
        reports[plain] = in_new_process(measure_plain, plain, workload)
        module = plain.replace("plain", "module")
        reports[module] = in_new_process(measure_module, plain, workload)
        reports[head] = in_new_process(measure_variant, head, workload)
        for name in (module, head):
            for what in ("step_s", "cpu_s", "peak_bytes"):
                ratio = reports[plain][what] / reports[name][what]
                reports[name][f"times_less_than_plain_{what}"] = round(ratio, 2)
    return reports


if __name__ == "__main__":
    run(measure_heads)
