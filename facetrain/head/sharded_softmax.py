"""Margin-softmax cross-entropy over class centers that are split over ranks, computed chunk by chunk.

With unit embeddings e, unit centers c, scale s and margin function f, the loss of a sample i with label y is

    −log( exp(s·f(e_i·c_y)) / (exp(s·f(e_i·c_y)) + Σ_{j≠y} exp(s·e_i·c_j)) )

and the loss of a step its mean over the global batch. Logits exist for one chunk of classes at a time: the forward
pass keeps three numbers per sample (the largest logit of a negative, the sum of their exponentials, the target logit),
and the backward pass computes each chunk again, unless the exponentials of all chunks are kept.

Embeddings and statistics keep their precision; `product_dtype` applies to the factors of the three large matrix
products only. The target cosine, to which the margin is applied, is always computed in full precision.
"""

# G gathered batch   D embedding   K this rank's classes   S sampled of K   C classes of a chunk
# W world size   P statistics per sample

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from facetrain.device.profiler_ranges import profiler_range
from facetrain.distributed import collectives
from facetrain.errors import UsageError
from facetrain.head import softmax
from facetrain.head.center_gradient import ParameterGradient, UnfinishedGradient
from facetrain.head.class_centers import Rows, RowTable
from facetrain.head.class_chunk import BackwardInputs, BoundedChunk, Chunk
from facetrain.head.margins.base import Margin
from facetrain.head.sampling import SampledClasses
from facetrain.head.target import TargetClass, find_target

TakeGradient = Callable[[Rows, Tensor | UnfinishedGradient, Tensor], None]
"""Called in the backward pass with a chunk's rows, their gradient, and whether loss and slopes are finite.

The gradient is (C, D), or with `ClassSweep.one_pass` what the update in one pass makes it from.
"""


class SecondAnchor(Protocol):
    """Further vector of each class, to which the embeddings are compared too; see `head.expectations`."""

    def log_ratio(self, unit_GD: Tensor, factor_GD: Tensor) -> Tensor:
        """Return the logarithm of the fraction that is added to the loss of each sample, (G,). Collective."""

    def embedding_gradient(self, loss_G: Tensor) -> Tensor:
        """Return the gradient of the losses by the unit embeddings, over the scale: (G, D), to be summed over ranks."""

    def update(self, unit_GD: Tensor, finite: Tensor) -> None:
        """Move the vectors after the backward pass, unless loss or slopes are not finite."""


@dataclass(frozen=True)
class ClassSweep:
    """Inputs of one pass over the classes of this rank that take part in a step."""

    sampled: SampledClasses
    margin: Margin
    group: collectives.ProcessGroup | None
    """Ranks over which the classes are split; None: all."""
    classes_per_chunk: int
    chunk_type: type[Chunk]
    take_gradient: TakeGradient | None
    """None: the centers are not trained, and have no gradient."""
    one_pass: bool
    """Whether `take_gradient` finishes the gradient itself."""
    count_nearest: Callable[[Tensor, int], None] | None
    """Called with the number of samples whose target class is on this rank and the nearest of all, and with G.

    Only if the negatives keep their cosines."""
    product_dtype: torch.dtype | None
    """Dtype to which the factors of the matrix products are rounded; None: they keep theirs."""
    keeps_exponentials: bool
    """Keep the exponentials of the negatives' logits for the backward pass, if the chunks are bounded."""
    loss_scale: Tensor | None
    """Factor on the loss (a scalar on the device) by which the gradient of the centers is divided; None: 1."""
    learns: bool
    """Whether the margin's running averages take in this batch."""
    table: str = "weight"
    """Name of the table with the centers."""
    second_anchor: SecondAnchor | None = None
    """Pass over the second anchor of each class, whose part is added to the loss."""

    @property
    def weight(self) -> RowTable:
        """Table of the centers."""
        return self.sampled.tables.by_name[self.table]

    def chunks(
        self, unit_GD: Tensor, target: TargetClass, inverse_norm_S: Tensor, *, has_norms: bool = True
    ) -> Iterator[tuple[Rows, Chunk]]:
        """Yield each chunk with its rows of the table.

        `inverse_norm_S` has 1 / |w| of all centers, or without `has_norms` each chunk writes its own.
        """
        size, index_S = self.sampled.size, self.sampled.index_S
        for start in range(0, size, self.classes_per_chunk):
            stop = min(start + self.classes_per_chunk, size)
            rows: Rows = slice(start, stop) if index_S is None else index_S[start:stop]
            inverse_norm_C = inverse_norm_S[start:stop]
            # Not assigned to a name here: it would keep the chunk's memory until the next one exists.
            yield (
                rows,
                self.chunk_type(
                    unit_GD,
                    self.weight.fetch(rows),
                    target,
                    self.margin,
                    start,
                    inverse_norm_C,
                    has_norms=has_norms,
                ),
            )

    def statistics(self, factor_GD: Tensor, target: TargetClass) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the loss's statistics (P, G) over this rank's negatives, and what the backward pass needs.

        That is 1 / |w| of all centers, and the exponentials of all chunks; none, if they are not kept.
        """
        statistics_PG = softmax.begin(target.cos_G)
        # Kept for the backward pass: S numbers save it a pass over the centers. Not one small tensor per chunk, which
        # would lie between the large ones of the chunks: the C library could then not use their memory again, and the
        # peak of a step grew by up to a quarter of the tables.
        inverse_norm_S, kept = target.cos_G.new_empty(self.sampled.size), []
        for _, chunk in self.chunks(factor_GD, target, inverse_norm_S, has_norms=False):
            if self.keeps_exponentials and isinstance(chunk, BoundedChunk):
                statistics_PG, exponential_GC = chunk.exponentials(statistics_PG)
                kept.append(exponential_GC)
            else:
                statistics_PG = chunk.add_to(statistics_PG)
            del chunk  # or its memory would be held while the next chunk is made
        return statistics_PG, inverse_norm_S, kept


def sharded_cross_entropy(
    unit_GD: Tensor, norm_G: Tensor | None, sweep: ClassSweep, gradient: ParameterGradient | None
) -> Tensor:
    """Return the mean loss over the global batch, a scalar that is the same on every rank.

    `unit_GD` holds the unit embeddings of all ranks, `norm_G` their norms if the margin needs them. Their gradient
    is this rank's part, to be summed over the ranks. The gradient of the centers is passed to `sweep.take_gradient`
    during the backward pass; with `gradient`, which takes it then, it is also the gradient of that parameter.
    Collective: one gather of a few numbers per sample.
    """
    weight_KD = None if gradient is None else gradient.weight
    loss: Tensor = _CrossEntropy.apply(unit_GD, norm_G, weight_KD, sweep, gradient)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        unit_GD: Tensor,
        norm_G: Tensor | None,
        weight_KD: Tensor | None,
        sweep: ClassSweep,
        gradient: ParameterGradient | None,
    ) -> Tensor:
        # The target logits first, apart from the chunks: the margin concerns them alone, and they keep full precision.
        target = find_target(
            unit_GD, norm_G, sweep.sampled, sweep.weight, sweep.margin, sweep.group, learns=sweep.learns
        )
        # Both passes over the classes use the state that the margin has now, and not that of a later batch.
        sweep = replace(sweep, margin=sweep.margin.snapshot())
        # Converted once: all chunks multiply the same factor.
        factor_GD = sweep.chunk_type.factor_of(
            unit_GD, sweep.margin.scale, sweep.product_dtype or unit_GD.dtype
        )
        # One pass over the classes of this rank. A chunk's logits are reduced to two numbers per sample, and freed.
        statistics_PG, inverse_norm_S, ctx.kept = sweep.statistics(factor_GD, target)
        # The message of the loss: a few numbers per sample, instead of logits to all classes. From here on every
        # rank computes the same from the same numbers, and no loss has to be sent.
        logit_G, statistics_WPG = exchange_statistics(
            statistics_PG, target.logit(sweep.margin.scale), sweep.group
        )
        loss_G = softmax.loss_of(softmax.join(statistics_WPG, bounded=sweep.chunk_type.is_bounded), logit_G)
        first_loss_G = loss_G
        if sweep.second_anchor is not None:
            # log(1 + A + B) from log(1 + A) and log B.
            loss_G = torch.logaddexp(loss_G, sweep.second_anchor.log_ratio(unit_GD, factor_GD))
        if sweep.count_nearest:
            largest_G = softmax.largest_logit(statistics_WPG)
            is_nearest_G = target.is_local_G & (target.cos_G * sweep.margin.scale >= largest_G)
            sweep.count_nearest(is_nearest_G.sum(), len(is_nearest_G))
        loss = (loss_G * (1 / len(loss_G))).sum()
        ctx.penalty_slope_G = None
        if norm_G is not None and (penalty := sweep.margin.norm_penalty(norm_G)):
            loss += penalty[0].mean()
            ctx.penalty_slope_G = penalty[1]
        # The finite flag stays on the device, where the update reads it.
        # The parameter is saved so that autograd refuses a backward pass after a change of it.
        ctx.save_for_backward(unit_GD, norm_G, factor_GD, logit_G, loss_G, torch.isfinite(loss), weight_KD)
        ctx.sweep, ctx.target, ctx.inverse_norm_S, ctx.gradient = sweep, target, inverse_norm_S, gradient
        ctx.first_loss_G, ctx.is_over = first_loss_G, False
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # Not by torch's `once_differentiable`: it lets gradients pass as constants if `grad_loss` needs no gradient.
        if torch.is_grad_enabled():
            raise UsageError(
                "the loss of the head has no second derivative: call backward without create_graph"
            )
        if ctx.is_over and ctx.gradient is None and ctx.sweep.take_gradient is not None:
            raise UsageError(
                "PartialFC with `update` takes one backward pass for each call; call the head again instead of "
                "backward(retain_graph=True)"
            )
        ctx.is_over = True
        # A training loop may call `backward` where autocast is on.
        with profiler_range("head"), without_autocast(grad_loss.device):
            return _CrossEntropy._gradients(ctx, grad_loss)

    @staticmethod
    def _gradients(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        unit_GD, norm_G, factor_GD, logit_G, loss_G, finite, _ = ctx.saved_tensors
        sweep: ClassSweep = ctx.sweep
        target: TargetClass = ctx.target
        if sweep.loss_scale is not None:
            # Only the embeddings' gradient goes through fp16 and needs the scale. It is multiplied in at the end.
            grad_loss = grad_loss / sweep.loss_scale
        weight = grad_loss * (1 / len(unit_GD))  # of a sample in the step's loss, which is a mean
        # Derivatives of the step's loss: by a sample's cosines with slope 1, by its target cosine after the margin,
        # and by its target cosine before it.
        by_cos = weight * sweep.margin.scale
        slope_G = softmax.target_slope(loss_G)
        if sweep.second_anchor is not None:
            # The target center's fraction of log(1 + A + B) alone: −A / (1 + A + B), with 1 + A = exp(first loss).
            slope_G = (-loss_G).exp() - (ctx.first_loss_G - loss_G).exp()
        by_margin_G = slope_G * by_cos
        by_target_G = torch.where(target.is_local_G, by_margin_G * target.with_margin.by_cos_G, 0)
        grad_norm_G = _norm_gradient(norm_G, by_margin_G, target, ctx.penalty_slope_G, grad_loss)
        # A margin can have a finite value and a slope that is not, which the update would write into the centers while
        # the backbone skips the step.
        finite = finite & by_target_G.isfinite().all()
        if grad_norm_G is not None:
            finite = finite & grad_norm_G.isfinite().all()
        bounded = sweep.chunk_type.is_bounded
        log_total_G = softmax.log_denominator(logit_G, loss_G, bounded=bounded)
        # Bounded chunks leave the denominator out of their slopes.
        by_slope = by_cos * (-log_total_G).exp()[:, None] if bounded else by_cos
        inputs = BackwardInputs(
            weighted_GD=(unit_GD * by_slope).to(factor_GD.dtype),
            # Apart from the product: the target's slope has the margin's derivative, and is not rounded to 16 bits.
            target_grad_GD=(by_target_G * target.inverse_norm_G)[:, None] * unit_GD,
            target_order=target.order(sweep.sampled.size) if sweep.one_pass else None,
        )
        grad_GD = torch.zeros_like(unit_GD)
        # Freed chunk by chunk: the graph lives as long as the loss, during the backward pass of the backbone, too. A
        # second backward pass through the graph computes the same exponentials again.
        kept, ctx.kept = ctx.kept, []
        # Without `enumerate`, which holds what it has returned until it returns the next.
        for rows, chunk in sweep.chunks(factor_GD, target, ctx.inverse_norm_S):
            slope_GC = kept.pop(0) if kept else chunk.slopes(log_total_G)
            if sweep.take_gradient is None:
                grad_GD += chunk.embedding_gradient(slope_GC)
                del chunk, slope_GC
                continue
            gradients = chunk.unfinished_gradients if sweep.one_pass else chunk.gradients
            # Both gradients are of the centers as the forward pass has seen them.
            added_GD, grad_CD = gradients(slope_GC, inputs)
            grad_GD += added_GD
            # Or their memory would be held while the next chunk is made.
            del chunk, gradients, added_GD, slope_GC
            # Now the centers of this chunk may change: no later chunk reads them, and `target` holds copies of the
            # target centers. Their gradient is freed at once; the gradient of all centers never exists, if the head
            # updates here.
            sweep.take_gradient(rows, grad_CD, finite)
            del grad_CD
        # This factor is the same for all chunks: once here, instead of once per logit.
        grad_GD.mul_(by_slope).add_(target.center_GD * by_target_G[:, None])
        if sweep.second_anchor is not None:
            grad_GD += sweep.second_anchor.embedding_gradient(loss_G) * by_cos
            sweep.second_anchor.update(unit_GD, finite)
        if sweep.loss_scale is not None:
            grad_GD.mul_(sweep.loss_scale)
            grad_norm_G = None if grad_norm_G is None else grad_norm_G * sweep.loss_scale
        return grad_GD, grad_norm_G, None if ctx.gradient is None else ctx.gradient.take(), None, None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast, which would round what must stay precise: the head chooses its dtypes."""
    # The meta device, on which `facetrain plan` counts the memory of a step, has no autocast to turn off.
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def exchange_statistics(
    statistics_PG: Tensor, logit_G: Tensor, group: collectives.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Gather target logits and statistics in one message; return (G,) and (W, P, G). Collective.

    Every rank then has the same numbers and computes the same loss from them.
    """
    gathered_WXG = collectives.gather(torch.cat([statistics_PG, logit_G[None]]), group)
    # Only one rank has the target class; the others sent −∞.
    return gathered_WXG[:, -1].amax(0), gathered_WXG[:, :-1]


def _norm_gradient(
    norm_G: Tensor | None,
    by_margin_G: Tensor,
    target: TargetClass,
    penalty_slope_G: Tensor | None,
    grad_loss: Tensor,
) -> Tensor | None:
    """Return the gradient of the embeddings' norms, of each sample once: on the rank of its target class."""
    if norm_G is None:
        return None
    grad_G = torch.zeros_like(norm_G)
    if target.with_margin.by_norm_G is not None:
        grad_G += by_margin_G * target.with_margin.by_norm_G
    if penalty_slope_G is not None:
        grad_G += penalty_slope_G * grad_loss / len(norm_G)
    return torch.where(target.is_local_G, grad_G, 0)
