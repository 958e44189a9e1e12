"""Test oracle of the head: `facetrain.head.dense` with the margins' equations, for float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from facetrain.head import dense
from facetrain.head.class_shard import ClassShard
from facetrain.head.sampling import draw_classes


def target_equation(margin: dict) -> Callable[[Tensor], Tensor]:
    """Return cos(m1·θ + m2) − m3 by the papers' equations, as a function of cos θ."""
    m1, m2, m3 = margin.get("m1", 1.0), margin.get("m2", 0.0), margin.get("m3", 0.0)

    def target(cos: Tensor) -> Tensor:
        theta = torch.arccos(cos)
        value = torch.cos(m1 * theta + m2) - m3
        if margin.get("gradient") == "straight_through":
            return cos + (value - cos).detach()
        return torch.where(theta + m2 > math.pi, cos - m2 * math.sin(m2) - m3, value) if m1 == 1 else value

    return target


def margin_logits(cos: Tensor, label: Tensor, margin: dict) -> Tensor:
    """Return logits (G, K) from cosines, differentiable by autograd."""
    return dense.dense_logits(
        cos, label, target_equation(margin), margin["scale"], margin.get("filter_threshold", 0.0)
    )


def dense_loss(
    embedding: Tensor, weight: Tensor, label: Tensor, margin: dict, sample: Tensor | None = None
) -> Tensor:
    """Return the mean cross-entropy over all classes, or over a sample of them (ascending class numbers)."""
    options = {name: margin[name] for name in ("scale", "filter_threshold") if name in margin}
    return dense.dense_loss(embedding, weight, label, target_equation(margin), **options, class_S=sample)


def sample_classes(shard: ClassShard, positive: Tensor, rate: float, *, seed: int, step: int) -> Tensor:
    """Return the classes of a shard that take part in a step: the batch's (`positive`) and the drawn, ascending."""
    drawn = torch.from_numpy(draw_classes(shard, rate, seed=seed, step=step))
    return torch.cat([drawn - shard.start, positive]).unique()


MARGINS = {
    "softmax": {"scale": 16.0},
    "cosface": {"scale": 64.0, "m3": 0.4},
    "arcface": {"scale": 64.0, "m2": 0.5},
    "arcface past pi": {"scale": 16.0, "m2": 1.3},
    "arcface straight through": {"scale": 64.0, "m2": 0.5, "gradient": "straight_through"},
    "combined": {"scale": 32.0, "m1": 1.2, "m2": 0.3, "m3": 0.2},
    "filtered": {"scale": 64.0, "m3": 0.4, "filter_threshold": 0.15},
}
