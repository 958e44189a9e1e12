"""Margin-softmax cross-entropy over class centres that are split over ranks, chunk by chunk.

With unit embeddings e and unit centres c, scale s and margin function f, the loss of a sample i with
label y is

    −log( exp(s·f(e_i·c_y)) / (exp(s·f(e_i·c_y)) + Σ_{j≠y} exp(s·e_i·c_j)) )

and the loss of a step its mean over the global batch. Logits exist for one chunk of classes at a
time: the forward pass keeps three numbers per sample (the largest logit, the sum of exponentials
relative to it, the target's logit), and the backward pass computes each chunk again.
"""

# B local batch   G gathered batch   D embedding   K this rank's classes   S sampled of K   C a chunk of S
# W world size

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from facetrain.distributed import collectives
from facetrain.head.margin import Margin
from facetrain.head.storage import Rows, RowTable

TakeGradient = Callable[[Rows, Tensor, Tensor], None]
"""Called in the backward pass with the rows of a chunk, their gradient (C, D), and whether the loss is finite."""


@dataclass(frozen=True)
class Sweep:
    """What one pass over this rank's classes needs."""

    weight: RowTable
    index_S: Tensor | None
    """The sample, ascending; None: all classes."""
    target_G: Tensor
    """The place of each sample's own class among the S, or −1 where another rank has it; int64."""
    margin: Margin
    chunk_size: int
    take_gradient: TakeGradient

    def chunks(self) -> Iterator[tuple[int, int, Rows]]:
        """Yield (first, past the last, rows of the table) of each chunk of the S."""
        total = len(self.weight.data) if self.index_S is None else len(self.index_S)
        for start in range(0, total, self.chunk_size):
            stop = min(start + self.chunk_size, total)
            yield start, stop, slice(start, stop) if self.index_S is None else self.index_S[start:stop]


def sharded_cross_entropy(unit_GD: Tensor, sweep: Sweep) -> Tensor:
    """Return the mean loss over the global batch, a scalar that is the same on every rank.

    `unit_GD` holds the unit embeddings of all ranks. Their gradient is this rank's part of it, to be
    summed over the ranks; the gradient of the centres goes to `sweep.take_gradient` while the backward
    pass runs. Collective: one exchange of three numbers per sample and rank.
    """
    return _CrossEntropy.apply(unit_GD, sweep)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit_GD: Tensor, sweep: Sweep) -> Tensor:
        largest_G, total_G, target_G = _statistics(unit_GD, sweep)
        log_total_G, target_G = _combine_over_ranks(largest_G, total_G, target_G)
        loss = (log_total_G - target_G).mean()
        ctx.save_for_backward(unit_GD, log_total_G, torch.isfinite(loss))
        ctx.sweep = sweep
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None]:
        unit_GD, log_total_G, finite = ctx.saved_tensors
        sweep: Sweep = ctx.sweep
        grad_GD = torch.zeros_like(unit_GD)
        per_sample = grad_loss / len(unit_GD)
        for start, stop, rows in sweep.chunks():
            chunk = _Chunk(unit_GD, sweep, start, stop, rows)
            slope_GC = chunk.cosine_gradient(log_total_G, per_sample)
            # cos = e·w/|w|, so the gradient reaches w through its direction alone: what points along
            # w is taken out of it. Its share is Σ slope·cos, a column sum.
            along_C = (slope_GC * chunk.cos_GC).sum(0)
            slope_GC *= chunk.inverse_C
            grad_GD.addmm_(slope_GC, chunk.weight_CD)
            grad_CD = slope_GC.T @ unit_GD
            grad_CD.addcmul_(chunk.weight_CD, (along_C * chunk.inverse_C**2)[:, None], value=-1)
            sweep.take_gradient(rows, grad_CD, finite)
        return grad_GD, None


class _Chunk:
    """Cosines of all embeddings to a chunk of class centres."""

    def __init__(self, unit_GD: Tensor, sweep: Sweep, start: int, stop: int, rows: Rows) -> None:
        self._margin = sweep.margin
        self.weight_CD = sweep.weight.fetch(rows).to(unit_GD.dtype)
        self.inverse_C = self.weight_CD.norm(dim=1).clamp_min(1e-12).reciprocal()
        self.cos_GC = (unit_GD @ self.weight_CD.T).mul_(self.inverse_C).clamp_(-1, 1)
        inside_G = (sweep.target_G >= start) & (sweep.target_G < stop)
        self.samples = inside_G.nonzero()[:, 0]
        self.columns = sweep.target_G[self.samples] - start
        self.target_cos, self.target_slope = sweep.margin.target(self.cos_GC[self.samples, self.columns])

    def logits(self) -> Tensor:
        """Return scaled logits with the margin in them (G, C)."""
        scale, threshold = self._margin.scale, self._margin.filter_threshold
        logit_GC = self.cos_GC * scale
        if threshold:
            logit_GC.masked_fill_(self.cos_GC > threshold, 0)
        logit_GC[self.samples, self.columns] = self.target_cos * scale
        return logit_GC

    def cosine_gradient(self, log_total_G: Tensor, per_sample: Tensor) -> Tensor:
        """Return the gradient of the loss by the cosines (G, C)."""
        scale, threshold = self._margin.scale, self._margin.filter_threshold
        slope_GC = self.logits().sub_(log_total_G[:, None]).exp_()
        slope_GC[self.samples, self.columns] -= 1
        if threshold:
            filtered_GC = self.cos_GC > threshold
            filtered_GC[self.samples, self.columns] = False
            slope_GC.masked_fill_(filtered_GC, 0)
        slope_GC[self.samples, self.columns] *= self.target_slope
        return slope_GC.mul_(per_sample * scale)


def _statistics(unit_GD: Tensor, sweep: Sweep) -> tuple[Tensor, Tensor, Tensor]:
    """Of this rank's logits per sample: the largest, Σ exp(logit − largest), and the target's or −∞; (G,) each."""
    largest_G = unit_GD.new_full((len(unit_GD),), -torch.inf)
    total_G = torch.zeros_like(largest_G)
    target_G = largest_G.clone()
    for start, stop, rows in sweep.chunks():
        chunk = _Chunk(unit_GD, sweep, start, stop, rows)
        logit_GC = chunk.logits()
        target_G[chunk.samples] = logit_GC[chunk.samples, chunk.columns]
        larger_G = torch.maximum(largest_G, logit_GC.amax(1))
        total_G = total_G * (largest_G - larger_G).exp() + logit_GC.sub_(larger_G[:, None]).exp_().sum(1)
        largest_G = larger_G
    return largest_G, total_G, target_G


def _combine_over_ranks(largest_G: Tensor, total_G: Tensor, target_G: Tensor) -> tuple[Tensor, Tensor]:
    """Return log Σ exp over the classes of all ranks, and the target's logit; (G,) each.

    One exchange carries maximum and sum together. Every rank combines the same numbers in the same
    order, so the results are equal bit for bit, and a decision that hangs on them is the same everywhere.
    """
    largest_WG, total_WG, target_WG = collectives.gather(torch.stack([largest_G, total_G, target_G])).unbind(
        1
    )
    largest_G = largest_WG.amax(0)
    total_G = (total_WG * (largest_WG - largest_G).exp()).sum(0)
    return total_G.log() + largest_G, target_WG.amax(0)
