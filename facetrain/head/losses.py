"""Losses on the logits: softmax cross-entropy, or UniFace's unified threshold.

A loss reduces this rank's logits to a few statistics per sample, chunk by chunk (`begin`, `add_chunk`). The
statistics of all ranks are joined into the loss (`join`), and the backward pass asks for the derivative of the loss
by each logit (`negative_slope_`, `target_slope`).
"""

# G gathered batch   C classes of a chunk   W world size   P statistics per sample

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.head.class_centers import allocate_tables
from facetrain.head.row_optimizer import RowOptimizer, moment_layout
from facetrain.head.settings import HeadSettings
from facetrain.optim.settings import OptimSettings


class Softmax:
    """Cross-entropy, log Σ_j exp z_j − z_y; the base class of the losses.

    A rank's statistics are its largest logit m and t = Σ exp(z − m), the target's included. Joined,
    log Σ exp z = M + log Σ_ranks t·exp(m − M) with M the largest m, so nothing overflows and no relevant term
    underflows. Every rank joins the same numbers in the same order: the results are equal bit for bit.
    """

    def begin(self, target_logit_G: Tensor) -> Tensor:
        """Return the statistics (P, G) before the first chunk. The target logit is −∞ if another rank has it."""
        # The target's own term: with its logit as the largest one, exp(z − m) is 1. It never passes through a chunk,
        # because the margin has changed it and the precision of the products must not round it.
        return torch.stack([target_logit_G, (target_logit_G > -torch.inf).to(target_logit_G.dtype)])

    def add_chunk(self, statistics_PG: Tensor, logit_GC: Tensor) -> Tensor:
        """Return the statistics with a chunk's logits added. `logit_GC` is overwritten; target logits in it are −∞."""
        largest_G, total_G = statistics_PG.unbind()
        larger_G = torch.maximum(largest_G, logit_GC.amax(1))
        base_G = _finite(larger_G)
        added_G = logit_GC.sub_(base_G[:, None]).exp_().sum(1)
        # The sum so far counts from the former largest logit: it is scaled to the new one.
        return torch.stack([larger_G, total_G * (largest_G - base_G).exp() + added_G])

    def join(self, statistics_WPG: Tensor, target_logit_G: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each sample from the statistics of all ranks, and what the slopes need; (G,) each."""
        largest_WG, total_WG = statistics_WPG.unbind(1)
        largest_G = _finite(largest_WG.amax(0))
        # All ranks join in the order of their numbers: another order would round differently on each.
        log_total_G = (total_WG * (largest_WG - largest_G).exp()).sum(0).log() + largest_G
        return log_total_G - target_logit_G, log_total_G

    def largest_logit(self, statistics_WPG: Tensor) -> Tensor | None:
        """Return the largest logit of each sample over all ranks, (G,); None if the statistics do not contain it."""
        return statistics_WPG[:, 0].amax(0)

    def negative_slope_(self, logit_GC: Tensor, joined_G: Tensor) -> Tensor:
        """Replace the negatives' logits by the derivatives of the losses, in place; 0 for a logit of −∞."""
        # The softmax of the negatives. In place: a chunk of logits is the largest tensor of a step.
        return logit_GC.sub_(joined_G[:, None]).exp_()

    def target_slope(self, target_logit_G: Tensor, joined_G: Tensor) -> Tensor:
        """Return the derivative of each loss by its target logit, (G,)."""
        # The target's probability, less 1.
        return (target_logit_G - joined_G).exp() - 1

    def accumulate_gradient(self, joined_G: Tensor, weight: Tensor) -> None:
        """Add to the gradient of the loss's own parameter, if it has one. `weight` is the weight of each sample."""

    def step(self, lr: float, valid: Tensor, grad_scale: float | Tensor = 1.0) -> None:
        """Update the parameter by its gradient / `grad_scale`; if the bool scalar `valid` is false, discard that."""

    def state(self) -> dict[str, Tensor]:
        """Return the parameter and its optimizer's state, for a checkpoint."""
        return {}


def _finite(largest: Tensor) -> Tensor:
    # If a rank's only class is a sample's target, all of its logits are −∞; −∞ − −∞ would be NaN.
    return largest.clamp_min(torch.finfo(largest.dtype).min)


class UnifiedThreshold(Softmax):
    """Unified cross-entropy (Zhou et al., "UniFace", ICCV 2023).

        softplus(b − z_y) + λ Σ_{j≠y} softplus(z_j − b),      softplus(x) = log(1 + exp x)

    One learned threshold b separates the target logits of all samples from all negatives, like the threshold of
    face verification; a softmax compares logits of the same sample only. With a margin it is the paper's marginal
    loss, with λ its balanced loss. The optimizer of the threshold has the settings of the centers'.
    """

    def __init__(
        self, optim: OptimSettings, settings: HeadSettings, device: torch.device, *, negatives: float
    ) -> None:
        """Take the settings of the head; `negatives` is the expected number of negative classes of a sample."""
        # One number: rounding it to 16 bits would save nothing.
        dtype = torch.promote_types(getattr(torch, settings.weight_dtype), torch.float32)
        layout = {"weight": (1, dtype), **moment_layout(optim, 1, dtype)}
        self._tables = allocate_tables(layout, 1, device).by_name
        self._optimizer, self._negative_weight = RowOptimizer(optim, device), settings.negative_weight
        # The more negatives a sample has, the higher the threshold that balances their part of the loss.
        self._threshold = self._tables["weight"].data.fill_(math.log(max(negatives, 1) * 10)).view(())
        self._gradient: Tensor | None = None

    def begin(self, target_logit_G: Tensor) -> Tensor:
        return target_logit_G.new_zeros(2, len(target_logit_G))

    def add_chunk(self, statistics_PG: Tensor, logit_GC: Tensor) -> Tensor:
        logit_GC.sub_(self._threshold)
        return statistics_PG + torch.stack([F.softplus(logit_GC).sum(1), logit_GC.sigmoid_().sum(1)])

    def join(self, statistics_WPG: Tensor, target_logit_G: Tensor) -> tuple[Tensor, Tensor]:
        # The derivative by b is sigmoid(b − z_y) − λ Σ_{j≠y} sigmoid(z_j − b): the sums of the second statistic give it
        # without a further pass.
        negative_G, passed_G = (statistics_WPG.sum(0) * self._negative_weight).unbind()
        missing_G = self._threshold - target_logit_G
        return F.softplus(missing_G) + negative_G, torch.sigmoid(missing_G) - passed_G

    def largest_logit(self, statistics_WPG: Tensor) -> Tensor | None:
        return None

    def negative_slope_(self, logit_GC: Tensor, joined_G: Tensor) -> Tensor:
        return logit_GC.sub_(self._threshold).sigmoid_().mul_(self._negative_weight)

    def target_slope(self, target_logit_G: Tensor, joined_G: Tensor) -> Tensor:
        return -torch.sigmoid(self._threshold - target_logit_G)

    def accumulate_gradient(self, joined_G: Tensor, weight: Tensor) -> None:
        # Computed from numbers that all ranks have, so the copies of the threshold stay equal.
        added = (joined_G * weight).sum()
        self._gradient = added if self._gradient is None else self._gradient + added

    def step(self, lr: float, valid: Tensor, grad_scale: float | Tensor = 1.0) -> None:
        if self._gradient is not None:
            # Any step number: it is the key of stochastic rounding, and a float32 threshold is not rounded.
            self._optimizer.begin_step(0, 0, lr=lr)
            self._optimizer.update(self._tables, slice(0, 1), self._gradient.view(1, 1) / grad_scale, valid)
        self._gradient = None

    def state(self) -> dict[str, Tensor]:
        names = {name: f"threshold_{name}" for name in self._tables} | {"weight": "threshold"}
        return {names[name]: table.data for name, table in self._tables.items()}
