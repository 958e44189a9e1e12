"""Losses on the logits: softmax cross-entropy, or UniFace's unified threshold.

A loss reduces this rank's logits to a few statistics per sample, chunk by chunk (`begin`, `add_chunk`). The
statistics of all ranks are joined into the loss (`join`), and the backward pass asks for the derivative of the loss
by each logit (`negative_slope_`, `target_slope`).
"""

# G gathered batch   C classes of a chunk   W world size   P statistics per sample

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.head.class_centers import allocate_tables
from facetrain.head.row_optimizer import RowOptimizer, moment_layout
from facetrain.head.settings import HeadSettings
from facetrain.optim.settings import OptimSettings


class Loss(Protocol):
    """Loss of a sample as a function of its target logit and its negatives' logits."""

    def begin(self, target_logit_G: Tensor) -> Tensor:
        """Return the statistics (P, G) before the first chunk. The target logit is −∞ if another rank has it."""

    def add_chunk(self, statistics_PG: Tensor, logit_GC: Tensor) -> Tensor:
        """Return the statistics with a chunk's logits added. `logit_GC` is overwritten; target logits in it are −∞."""

    def join(self, statistics_WPG: Tensor, target_logit_G: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each sample from the statistics of all ranks, and what the slopes need; (G,) each."""

    def largest_logit(self, statistics_WPG: Tensor) -> Tensor | None:
        """Return the largest logit of each sample over all ranks, (G,); None if the statistics do not contain it."""

    def negative_slope_(self, logit_GC: Tensor, joined_G: Tensor) -> Tensor:
        """Replace the negatives' logits by the derivatives of the losses, in place; 0 for a logit of −∞."""

    def target_slope(self, target_logit_G: Tensor, joined_G: Tensor) -> Tensor:
        """Return the derivative of each loss by its target logit, (G,)."""

    def accumulate_gradient(self, joined_G: Tensor, weight_G: Tensor) -> None:
        """Add to the gradient of the loss's own parameter, if it has one. `weight_G` is the weight of each sample."""


class Softmax:
    """Cross-entropy, log Σ_j exp z_j − z_y.

    A rank's statistics are its largest logit m and t = Σ exp(z − m), the target's included. Joined,
    log Σ exp z = M + log Σ_ranks t·exp(m − M) with M the largest m, so nothing overflows and no relevant term
    underflows. Every rank joins the same numbers in the same order: the results are equal bit for bit.
    """

    def begin(self, target_logit_G: Tensor) -> Tensor:
        return torch.stack([target_logit_G, (target_logit_G > -torch.inf).to(target_logit_G.dtype)])

    def add_chunk(self, statistics_PG: Tensor, logit_GC: Tensor) -> Tensor:
        largest_G, total_G = statistics_PG.unbind()
        larger_G = torch.maximum(largest_G, logit_GC.amax(1))
        # If a rank's only class is a sample's target, all are −∞; −∞ − −∞ would be NaN.
        base_G = larger_G.clamp_min(torch.finfo(larger_G.dtype).min)
        added_G = logit_GC.sub_(base_G[:, None]).exp_().sum(1)
        return torch.stack([larger_G, total_G * (largest_G - base_G).exp() + added_G])

    def join(self, statistics_WPG: Tensor, target_logit_G: Tensor) -> tuple[Tensor, Tensor]:
        largest_WG, total_WG = statistics_WPG.unbind(1)
        largest_G = largest_WG.amax(0)
        # All ranks join in the order of their numbers: another order would round differently on each.
        log_total_G = (total_WG * (largest_WG - largest_G).exp()).sum(0).log() + largest_G
        return log_total_G - target_logit_G, log_total_G

    def largest_logit(self, statistics_WPG: Tensor) -> Tensor | None:
        return statistics_WPG[:, 0].amax(0)

    def negative_slope_(self, logit_GC: Tensor, joined_G: Tensor) -> Tensor:
        return logit_GC.sub_(joined_G[:, None]).exp_()

    def target_slope(self, target_logit_G: Tensor, joined_G: Tensor) -> Tensor:
        return (target_logit_G - joined_G).exp() - 1

    def accumulate_gradient(self, joined_G: Tensor, weight_G: Tensor) -> None:
        pass


class UnifiedThreshold:
    """Unified cross-entropy (Zhou et al., "UniFace", ICCV 2023).

        softplus(b − z_y) + λ Σ_{j≠y} softplus(z_j − b),      softplus(x) = log(1 + exp x)

    One learned threshold b separates the target logits of all samples from all negatives, like the threshold of
    face verification; a softmax compares logits of the same sample only. With a margin it is the paper's marginal
    loss, with λ its balanced loss.
    """

    def __init__(self, threshold: Tensor, negative_weight: float = 1.0) -> None:
        self._threshold, self._negative_weight = threshold, negative_weight
        self.gradient: Tensor | None = None
        """Accumulated gradient of the threshold."""

    def begin(self, target_logit_G: Tensor) -> Tensor:
        return target_logit_G.new_zeros(2, len(target_logit_G))

    def add_chunk(self, statistics_PG: Tensor, logit_GC: Tensor) -> Tensor:
        logit_GC.sub_(self._threshold)
        return statistics_PG + torch.stack([F.softplus(logit_GC).sum(1), logit_GC.sigmoid_().sum(1)])

    def join(self, statistics_WPG: Tensor, target_logit_G: Tensor) -> tuple[Tensor, Tensor]:
        negative_G, passed_G = (statistics_WPG.sum(0) * self._negative_weight).unbind()
        missing_G = self._threshold - target_logit_G
        return F.softplus(missing_G) + negative_G, torch.sigmoid(missing_G) - passed_G

    def largest_logit(self, statistics_WPG: Tensor) -> Tensor | None:
        return None

    def negative_slope_(self, logit_GC: Tensor, joined_G: Tensor) -> Tensor:
        return logit_GC.sub_(self._threshold).sigmoid_().mul_(self._negative_weight)

    def target_slope(self, target_logit_G: Tensor, joined_G: Tensor) -> Tensor:
        return -torch.sigmoid(self._threshold - target_logit_G)

    def accumulate_gradient(self, joined_G: Tensor, weight_G: Tensor) -> None:
        # Computed from numbers that all ranks have, so the copies of the threshold stay equal.
        added = (joined_G * weight_G).sum()
        self.gradient = added if self.gradient is None else self.gradient + added


class LearnedThreshold:
    """Unified loss together with its threshold and the threshold's optimizer, which has the centers' settings."""

    def __init__(
        self,
        optim: OptimSettings,
        settings: HeadSettings,
        device: torch.device,
        *,
        negatives: float,
    ) -> None:
        """Take the settings of the head; `negatives` is the expected number of negative classes of a sample."""
        # One number: rounding it to 16 bits would save nothing.
        dtype = torch.promote_types(getattr(torch, settings.weight_dtype), torch.float32)
        moments = moment_layout(optim, 1, dtype)
        self._tables = allocate_tables({"weight": (1, dtype), **moments}, 1, device).by_name
        self._optimizer = RowOptimizer(optim, device)
        # The more negatives a sample has, the higher the threshold that balances their part of the loss.
        threshold = self._tables["weight"].data.fill_(math.log(max(negatives, 1) * 10))
        self.loss = UnifiedThreshold(threshold.view(()), settings.negative_weight)

    def step(self, lr: float, valid: Tensor, grad_scale: float | Tensor = 1.0) -> None:
        """Update the threshold by its accumulated gradient / `grad_scale`; if not `valid`, discard the gradient."""
        if self.loss.gradient is not None:
            gradient = self.loss.gradient.view(1, 1) / grad_scale
            self._optimizer.update(self._tables, slice(0, 1), gradient, lr, valid)
        self.loss.gradient = None

    def state(self) -> dict[str, Tensor]:
        """Return the threshold and its optimizer's state, for a checkpoint."""
        names = {name: f"threshold_{name}" for name in self._tables} | {"weight": "threshold"}
        return {names[name]: table.data for name, table in self._tables.items()}
