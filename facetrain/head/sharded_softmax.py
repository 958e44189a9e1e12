"""Margin-softmax cross-entropy over class centers that are split over ranks, chunk by chunk.

With unit embeddings e and unit centers c, scale s and margin function f, the loss of a sample i with
label y is

    −log( exp(s·f(e_i·c_y)) / (exp(s·f(e_i·c_y)) + Σ_{j≠y} exp(s·e_i·c_j)) )

and the loss of a step its mean over the global batch. Logits exist for one chunk of classes at a
time: the forward pass keeps three numbers per sample (the largest logit, the sum of exponentials
relative to it, the target's logit), and the backward pass computes each chunk again.
"""

# B local batch   G gathered batch   D embedding   K this rank's classes   S sampled of K   C a chunk of S
# N sub-centers of a class   W world size

# Embeddings and statistics keep their precision; `product_dtype` is that of the factors of the three large
# products alone. The own class's cosine is always computed in full: it is the one that the margin sees.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from facetrain.distributed import collectives
from facetrain.head.class_centers import Rows, RowTable
from facetrain.head.class_chunk import Backward, Chunk
from facetrain.head.losses import Loss
from facetrain.head.margins import Margin
from facetrain.head.target import TargetClass, find_target
from facetrain.profiling import profiler_range

TakeGradient = Callable[[Rows, Tensor, Tensor], None]
"""Called in the backward pass with a chunk's rows, their gradient (C, N·D), and whether the loss is finite."""


@dataclass(frozen=True)
class ClassSweep:
    """What one pass over this rank's classes needs."""

    weight: RowTable
    index_S: Tensor | None
    """Rows of the classes that take part; None: all rows."""
    place_G: Tensor
    """The place of each sample's own class among the S, or −1 where another rank has it; int64."""
    margin: Margin
    objective: Loss
    chunk_size: int
    take_gradient: TakeGradient
    finish: Callable[[TargetClass, Tensor], None]
    """Called when the backward pass is over, with the own classes and whether the loss is finite."""
    chunk_type: type[Chunk] = Chunk
    product_dtype: torch.dtype | None = None
    """What the factors of the matrix products are rounded to; None: they stay as they are."""
    dominant: Tensor | None = None
    """Which sub-center of each row is left, (K,) int64; None: all of them."""
    least_cos: float = -1.0
    """Samples further than this from their own center are taken for label noise, and left out of the loss."""

    @property
    def size(self) -> int:
        """How many classes of this rank take part."""
        return len(self.weight.data) if self.index_S is None else len(self.index_S)

    def chunks(self, factor_GD: Tensor, own: TargetClass) -> Iterator[tuple[Rows, Chunk]]:
        """Yield each chunk of the S with its rows of the table; the last one is gone when the next is made."""
        for start in range(0, self.size, self.chunk_size):
            stop = min(start + self.chunk_size, self.size)
            rows: Rows = slice(start, stop) if self.index_S is None else self.index_S[start:stop]
            dominant_C = None if self.dominant is None else self.dominant[rows]
            yield (
                rows,
                self.chunk_type(factor_GD, self.weight.fetch(rows), own, self.margin, start, dominant_C),
            )


def sharded_cross_entropy(unit_GD: Tensor, norm_G: Tensor | None, sweep: ClassSweep) -> Tensor:
    """Return the mean loss over the global batch, a scalar that is the same on every rank.

    `unit_GD` holds the unit embeddings of all ranks, `norm_G` their lengths where the margin sees them. Their
    gradient is this rank's part of it, to be summed over the ranks; the gradient of the centers goes to
    `sweep.take_gradient` while the backward pass runs. Collective: one exchange of a few numbers per sample.
    """
    loss: Tensor = _CrossEntropy.apply(unit_GD, norm_G, sweep)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit_GD: Tensor, norm_G: Tensor | None, sweep: ClassSweep) -> Tensor:
        own = find_target(
            unit_GD, norm_G, sweep.place_G, sweep.index_S, sweep.weight, sweep.dominant, sweep.margin
        )
        factor_GD = unit_GD.to(sweep.product_dtype or unit_GD.dtype)
        own_G = torch.where(own.here_G, own.target.value_G * sweep.margin.scale, -torch.inf)
        part_PG = sweep.objective.begin(own_G)
        for _, chunk in sweep.chunks(factor_GD, own):
            part_PG = chunk.add_to(part_PG, sweep.objective)
            del chunk  # or two would exist while the next is made
        kept_G = own.here_G & (own.cos_G >= sweep.least_cos)
        own_G, part_WPG, kept_G = _exchange(part_PG, own_G, kept_G if sweep.least_cos > -1 else None)
        loss_G, joined_G = sweep.objective.join(part_WPG, own_G)
        weight_G = kept_G / kept_G.sum().clamp_min(1)
        loss = (loss_G * weight_G).sum()
        if norm_G is not None and (penalty := sweep.margin.norm_penalty(norm_G)):
            loss += penalty[0].mean()
        ctx.save_for_backward(unit_GD, norm_G, factor_GD, own_G, joined_G, weight_G, torch.isfinite(loss))
        ctx.sweep, ctx.own = sweep, own
        return loss

    @staticmethod
    @profiler_range("head")
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor | None, None]:
        unit_GD, norm_G, factor_GD, own_G, joined_G, weight_G, finite = ctx.saved_tensors
        sweep: ClassSweep = ctx.sweep
        own: TargetClass = ctx.own
        weight_G = weight_G * grad_loss
        by_cos_G = weight_G * sweep.margin.scale
        push_G = torch.where(own.here_G, sweep.objective.own_slope(own_G, joined_G) * by_cos_G, 0)
        own_push_G = push_G * own.target.by_cos_G
        back = Backward(
            factor_GD=(unit_GD * by_cos_G[:, None]).to(factor_GD.dtype),
            own_GD=(own_push_G * own.inverse_G)[:, None] * unit_GD,
        )
        grad_GD = torch.zeros_like(unit_GD)
        for rows, chunk in sweep.chunks(factor_GD, own):
            added_GD, grad_CX = chunk.gradients(chunk.slopes(sweep.objective, joined_G), back)
            grad_GD += added_GD
            del chunk, added_GD  # or two chunks would exist while the next is made
            sweep.take_gradient(rows, grad_CX, finite)
            del grad_CX
        grad_GD.mul_(by_cos_G[:, None]).add_(own.center_GD * own_push_G[:, None])
        sweep.objective.collect(joined_G, weight_G)
        sweep.finish(own, finite)
        return grad_GD, _norm_gradient(norm_G, push_G, own, sweep, grad_loss), None


def _exchange(part_PG: Tensor, own_G: Tensor, kept_G: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Tell all ranks each own class's logit, the numbers of all, and which samples count; (G,), (W, P, G), (G,).

    In one message; every rank then has the same numbers, and computes the same loss from them.
    """
    rows = [part_PG, own_G[None]] + ([] if kept_G is None else [kept_G[None].to(own_G.dtype)])
    joint_WXG = collectives.gather(torch.cat(rows))
    part_WPG, rest_WXG = joint_WXG.tensor_split([len(part_PG)], dim=1)
    rest_XG = rest_WXG.amax(0)
    return rest_XG[0], part_WPG, torch.ones_like(own_G) if kept_G is None else rest_XG[1]


def _norm_gradient(
    norm_G: Tensor | None, push_G: Tensor, own: TargetClass, sweep: ClassSweep, grad_loss: Tensor
) -> Tensor | None:
    """Return the gradient of the embeddings' lengths: of each sample once, on the rank of its own class."""
    if norm_G is None:
        return None
    grad_G = torch.zeros_like(norm_G)
    if own.target.by_norm_G is not None:
        grad_G += push_G * own.target.by_norm_G
    if penalty := sweep.margin.norm_penalty(norm_G):
        grad_G += torch.where(own.here_G, penalty[1] * grad_loss / len(norm_G), 0)
    return grad_G
