"""Test oracle of the head: one process, all logits at once, float64, autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from facetrain.head.class_shard import ClassShard
from facetrain.head.sampling import draw_classes


def margin_logits(cos: Tensor, label: Tensor, margin: dict) -> Tensor:
    """Return logits (G, K) from cosines by the papers' equations, differentiable by autograd."""
    theta = torch.arccos(cos)
    m1, m2, m3 = margin.get("m1", 1.0), margin.get("m2", 0.0), margin.get("m3", 0.0)
    target = torch.cos(m1 * theta + m2) - m3
    straight_through = margin.get("gradient") == "straight_through"
    if m1 == 1 and not straight_through:
        target = torch.where(theta + m2 > math.pi, cos - m2 * math.sin(m2) - m3, target)
    if straight_through:
        target = cos + (target - cos).detach()
    is_target = torch.nn.functional.one_hot(label, cos.shape[1]).bool()
    negatives = cos
    if margin.get("filter_threshold"):
        negatives = torch.where(cos > margin["filter_threshold"], torch.zeros_like(cos), cos)
    return torch.where(is_target, target, negatives) * margin["scale"]


def dense_loss(
    embedding: Tensor, weight: Tensor, label: Tensor, margin: dict, sample: Tensor | None = None
) -> Tensor:
    """Return the mean cross-entropy over all classes, or over a sample of them (ascending class numbers)."""
    if sample is not None:
        weight, label = weight[sample], torch.searchsorted(sample, label)
    unit, center = torch.nn.functional.normalize(embedding), torch.nn.functional.normalize(weight)
    return torch.nn.functional.cross_entropy(margin_logits(unit @ center.T, label, margin), label)


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
