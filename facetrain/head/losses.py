"""What becomes of the logits: the softmax's cross-entropy, or one threshold for all.

An objective reduces each rank's logits to a few numbers per sample while they pass by (`begin`, `add`),
joins those of all ranks into the loss (`join`), and gives the derivative of a logit (`slope_`, `own_slope`).
"""

# G gathered batch   C a chunk of classes   W world size   P numbers per sample that ranks exchange

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.head.class_centers import place_tables
from facetrain.head.row_optimizer import RowOptimizer, RowOptimizerSettings, moment_layout


class Loss(Protocol):
    """The loss of a sample as a function of its logits."""

    def begin(self, own_G: Tensor) -> Tensor:
        """Return the numbers (P, G) of no other class yet. `own_G`: the own class's logit, −∞ on other ranks."""

    def add(self, part_PG: Tensor, logit_GC: Tensor) -> Tensor:
        """Return the numbers with a chunk's logits in them, which are used up; the own class's there is −∞."""

    def join(self, part_WPG: Tensor, own_G: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each sample from the numbers of all ranks, and what the slopes need of it; (G,)."""

    def slope_(self, logit_GC: Tensor, joined_G: Tensor) -> Tensor:
        """Turn other classes' logits into the derivatives of their samples' losses, in place; 0 at −∞."""

    def own_slope(self, own_G: Tensor, joined_G: Tensor) -> Tensor:
        """Return the derivative of the loss by the own class's logit, (G,)."""

    def collect(self, joined_G: Tensor, weight_G: Tensor) -> None:
        """Take note of the gradient of the objective's own parameter, if it has one. `weight_G`: of each loss."""


class Softmax:
    """Cross-entropy, log Σ_j exp z_j − z_y.

    A rank's numbers are its largest logit m and t = Σ exp(z − m), the own class's included. Joined,
    log Σ exp z = M + log Σ_ranks t·exp(m − M) with M the largest m: nothing overflows, and nothing that
    counts vanishes. Every rank joins the same numbers in the same order, so the results are equal bit for bit.
    """

    def begin(self, own_G: Tensor) -> Tensor:
        return torch.stack([own_G, (own_G > -torch.inf).to(own_G.dtype)])

    def add(self, part_PG: Tensor, logit_GC: Tensor) -> Tensor:
        largest_G, total_G = part_PG.unbind()
        larger_G = torch.maximum(largest_G, logit_GC.amax(1))
        # A rank whose only class here is a sample's own has nothing to add; −∞ − −∞ would not be a number.
        base_G = larger_G.clamp_min(torch.finfo(larger_G.dtype).min)
        added_G = logit_GC.sub_(base_G[:, None]).exp_().sum(1)
        return torch.stack([larger_G, total_G * (largest_G - base_G).exp() + added_G])

    def join(self, part_WPG: Tensor, own_G: Tensor) -> tuple[Tensor, Tensor]:
        largest_WG, total_WG = part_WPG.unbind(1)
        largest_G = largest_WG.amax(0)
        log_total_G = (total_WG * (largest_WG - largest_G).exp()).sum(0).log() + largest_G
        return log_total_G - own_G, log_total_G

    def slope_(self, logit_GC: Tensor, joined_G: Tensor) -> Tensor:
        return logit_GC.sub_(joined_G[:, None]).exp_()

    def own_slope(self, own_G: Tensor, joined_G: Tensor) -> Tensor:
        return (own_G - joined_G).exp() - 1

    def collect(self, joined_G: Tensor, weight_G: Tensor) -> None:
        pass


class UnifiedThreshold:
    """Unified cross-entropy (Zhou et al., "UniFace", ICCV 2023).

        softplus(b − z_y) + λ Σ_{j≠y} softplus(z_j − b),      softplus(x) = log(1 + exp x)

    One learned threshold b parts the logits of all samples' own classes from all others, as the one
    threshold of verification will; a softmax compares each sample's logits only with one another. With a
    margin it is the paper's marginal loss, with λ the balanced one.
    """

    def __init__(self, bias: Tensor, negative_weight: float = 1.0) -> None:
        self.bias, self._negative_weight = bias, negative_weight
        self.gradient: Tensor | None = None

    def begin(self, own_G: Tensor) -> Tensor:
        return own_G.new_zeros(2, len(own_G))

    def add(self, part_PG: Tensor, logit_GC: Tensor) -> Tensor:
        logit_GC.sub_(self.bias)
        return part_PG + torch.stack([F.softplus(logit_GC).sum(1), logit_GC.sigmoid_().sum(1)])

    def join(self, part_WPG: Tensor, own_G: Tensor) -> tuple[Tensor, Tensor]:
        negative_G, passed_G = (part_WPG.sum(0) * self._negative_weight).unbind()
        return F.softplus(self.bias - own_G) + negative_G, torch.sigmoid(self.bias - own_G) - passed_G

    def slope_(self, logit_GC: Tensor, joined_G: Tensor) -> Tensor:
        return logit_GC.sub_(self.bias).sigmoid_().mul_(self._negative_weight)

    def own_slope(self, own_G: Tensor, joined_G: Tensor) -> Tensor:
        return -torch.sigmoid(self.bias - own_G)

    def collect(self, joined_G: Tensor, weight_G: Tensor) -> None:
        # Of numbers that all ranks have, so every rank moves its copy of the threshold alike.
        added = (joined_G * weight_G).sum()
        self.gradient = added if self.gradient is None else self.gradient + added


class LearnedThreshold:
    """The threshold with its optimizer, whose rules are those of the centers."""

    def __init__(
        self,
        start: float,
        negative_weight: float,
        dtype: torch.dtype,
        device: torch.device,
        optimizer: RowOptimizerSettings,
    ) -> None:
        dtype = torch.promote_types(dtype, torch.float32)
        moments = moment_layout(optimizer, 1, dtype)
        self._tables = place_tables({"weight": (1, dtype), **moments}, 1, device).by_name
        self._optimizer = RowOptimizer(optimizer, device)
        threshold = self._tables["weight"].data.fill_(start)
        self.objective = UnifiedThreshold(threshold.view(()), negative_weight)

    def step(self, lr: float, valid: Tensor, grad_scale: float | Tensor = 1.0) -> None:
        """Move the threshold by the gradient collected since the last step, `grad_scale` times too large.

        Where `valid` is not set, the gradient is only forgotten.
        """
        if self.objective.gradient is not None:
            gradient = self.objective.gradient.view(1, 1) / grad_scale
            self._optimizer.update(self._tables, slice(0, 1), gradient, lr, valid)
        self.objective.gradient = None

    def state(self) -> dict[str, Tensor]:
        """Return the threshold and what its optimizer keeps, for a checkpoint."""
        names = {name: f"threshold_{name}" for name in self._tables} | {"weight": "threshold"}
        return {names[name]: table.data for name, table in self._tables.items()}
