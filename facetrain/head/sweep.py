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

# Embeddings and statistics keep their precision; `product_dtype` is that of the factors of the three large
# products alone. The own class's cosine is always computed in full: it is the one that the margin sees.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.distributed import collectives
from facetrain.head.margin import Margin
from facetrain.head.storage import Rows, RowTable

TakeGradient = Callable[[Rows, Tensor, Tensor], None]
"""Called in the backward pass with a chunk's rows, their gradient (C, D), and whether the loss is finite."""


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
    product_dtype: torch.dtype | None = None
    """What the factors of the matrix products are rounded to; None: they stay as they are."""

    @property
    def size(self) -> int:
        """How many classes of this rank take part."""
        return len(self.weight.data) if self.index_S is None else len(self.index_S)

    def chunks(self) -> Iterator[tuple[int, int, Rows]]:
        """Yield (first, past the last, rows of the table) of each chunk of the S."""
        for start in range(0, self.size, self.chunk_size):
            stop = min(start + self.chunk_size, self.size)
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
        own = _own_class(unit_GD, sweep)
        factor_GD = unit_GD.to(sweep.product_dtype or unit_GD.dtype)
        largest_G, total_G = _statistics(factor_GD, own, sweep)
        target_G = torch.where(own.here_G, own.logit_G, -torch.inf)
        log_total_G, target_G = _combine_over_ranks(largest_G, total_G, target_G)
        loss = (log_total_G - target_G).mean()
        ctx.save_for_backward(factor_GD, log_total_G, torch.isfinite(loss))
        ctx.sweep, ctx.own = sweep, own
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None]:
        factor_GD, log_total_G, finite = ctx.saved_tensors
        sweep, own = ctx.sweep, ctx.own
        grad_GD = torch.zeros(factor_GD.shape, dtype=log_total_G.dtype, device=factor_GD.device)
        per_logit = grad_loss / len(factor_GD) * sweep.margin.scale
        for start, stop, rows in sweep.chunks():
            chunk = _Chunk(factor_GD, own, sweep, start, stop, rows)
            slope_GC = chunk.slopes(log_total_G).mul_(chunk.inverse_C * per_logit).to(factor_GD.dtype)
            grad_GD += slope_GC @ chunk.factor_CD
            grad_CD = (slope_GC.T @ factor_GD).to(grad_GD.dtype)
            # cos = e·w/|w| does not change with |w|: what points along w is taken out of the gradient.
            weight_CD = chunk.weight_CD.to(grad_CD.dtype)
            along_C = torch.linalg.vecdot(grad_CD, weight_CD)
            grad_CD.addcmul_(weight_CD, (along_C * chunk.inverse_C**2)[:, None], value=-1)
            sweep.take_gradient(rows, grad_CD, finite)
            del chunk, slope_GC, grad_CD, weight_CD  # or two chunks would exist while the next is made
        return grad_GD, None


@dataclass(frozen=True)
class _OwnClass:
    """Where each sample's own class is, and what the margin makes of its cosine; (G,) each."""

    place_G: Tensor
    here_G: Tensor
    logit_G: Tensor
    slope_G: Tensor

    def columns(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Whether the own class lies in [start, stop), and in which column (any, if it does not)."""
        inside_G = (self.place_G >= start) & (self.place_G < stop)
        return inside_G, (self.place_G - start).clamp(0, stop - start - 1)[:, None]


def _own_class(unit_GD: Tensor, sweep: Sweep) -> _OwnClass:
    place_G = sweep.target_G
    here_G = place_G >= 0
    cos_G = unit_GD.new_zeros(len(unit_GD))
    if sweep.size:
        place = place_G.clamp_min(0)
        rows = place if sweep.index_S is None else sweep.index_S[place]
        centre_GD = F.normalize(sweep.weight.fetch(rows).to(unit_GD.dtype))
        cos_G = torch.linalg.vecdot(unit_GD, centre_GD).clamp_(-1, 1)
    value_G, slope_G = sweep.margin.target(cos_G)
    return _OwnClass(place_G, here_G, value_G * sweep.margin.scale, slope_G)


class _Chunk:
    """Logits of all embeddings to a chunk of class centres."""

    def __init__(
        self, factor_GD: Tensor, own: _OwnClass, sweep: Sweep, start: int, stop: int, rows: Rows
    ) -> None:
        self._own, self._margin = own, sweep.margin
        compute = own.logit_G.dtype
        self.weight_CD = sweep.weight.fetch(rows)
        self.factor_CD = self.weight_CD.to(factor_GD.dtype)
        self.inverse_C = (
            torch.linalg.vector_norm(self.weight_CD, dim=1, dtype=compute).clamp_min_(1e-12).reciprocal_()
        )
        self.logit_GC = (factor_GD @ self.factor_CD.T).to(compute).mul_(self.inverse_C * sweep.margin.scale)
        self.inside_G, self.column_G1 = own.columns(start, stop)
        self._filtered_GC = None
        if sweep.margin.filter_threshold:
            self._filtered_GC = self.logit_GC > sweep.margin.filter_threshold * sweep.margin.scale
            self.logit_GC.masked_fill_(self._filtered_GC, 0)
        self._put(self.logit_GC, own.logit_G)

    def slopes(self, log_total_G: Tensor) -> Tensor:
        """Turn the logits into the derivative of the summed loss by cosine times scale (G, C), in place."""
        slope_GC = self.logit_GC.sub_(log_total_G[:, None]).exp_()
        if self._filtered_GC is not None:
            slope_GC.masked_fill_(self._filtered_GC, 0)
        self._put(slope_GC, ((self._own.logit_G - log_total_G).exp() - 1) * self._own.slope_G)
        return slope_GC

    def _put(self, matrix_GC: Tensor, own_G: Tensor) -> None:
        """Write each sample's number into its own class's column, not asking the device which are here."""
        present_G = matrix_GC.gather(1, self.column_G1)[:, 0]
        matrix_GC.scatter_(1, self.column_G1, torch.where(self.inside_G, own_G, present_G)[:, None])


def _statistics(factor_GD: Tensor, own: _OwnClass, sweep: Sweep) -> tuple[Tensor, Tensor]:
    """Of this rank's logits per sample: the largest, and Σ exp(logit − largest); (G,) each."""
    largest_G = torch.full_like(own.logit_G, -torch.inf)
    total_G = torch.zeros_like(largest_G)
    for start, stop, rows in sweep.chunks():
        logit_GC = _Chunk(factor_GD, own, sweep, start, stop, rows).logit_GC
        larger_G = torch.maximum(largest_G, logit_GC.amax(1))
        total_G = total_G * (largest_G - larger_G).exp() + logit_GC.sub_(larger_G[:, None]).exp_().sum(1)
        largest_G = larger_G
        del logit_GC
    return largest_G, total_G


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
