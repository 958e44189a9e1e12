"""Test oracles of adaptive margins: all logits, float64, autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, one_hot

from facetrain import own_parts
from facetrain.counter_rng import key_of, normal
from facetrain.head.margins.base import Margin
from tests.support.dense_head import MARGINS, dense_loss
from tests.support.heads import margin_settings

SCALE = 16.0


class DenseVariant:
    """Base class of the oracles: the loss from embeddings, centers and labels; it keeps running averages and counts."""

    def loss(self, embedding: Tensor, weight: Tensor, label: Tensor, classes: Tensor, step: int) -> Tensor:
        """Return the mean loss; `weight` and `label` refer to the sampled `classes` only."""
        raise NotImplementedError


def cosines(embedding: Tensor, weight: Tensor) -> Tensor:
    return normalize(embedding) @ normalize(weight).T


def with_target(cos: Tensor, label: Tensor, target: Tensor) -> Tensor:
    is_target = one_hot(label, cos.shape[1]).bool()
    return torch.where(is_target, target[:, None], cos)


def target_of(cos: Tensor, label: Tensor) -> Tensor:
    return cos.gather(1, label[:, None])[:, 0]


class DenseMargin(DenseVariant):
    def __init__(self, margin: dict[str, Any]) -> None:
        self.margin = margin

    def loss(self, embedding, weight, label, classes, step):
        return dense_loss(embedding, weight, label, self.margin)


class DenseAdaFace(DenseVariant):
    def __init__(self) -> None:
        self.mean, self.deviation = 20.0, 100.0

    def loss(self, embedding, weight, label, classes, step):
        norm = embedding.detach().norm(dim=1).clip(0.001, 100)
        self.mean = 0.01 * norm.mean().item() + 0.99 * self.mean
        self.deviation = 0.01 * norm.std().item() + 0.99 * self.deviation
        quality = ((norm - self.mean) / (self.deviation + 1e-3) * 0.333).clip(-1, 1)
        cos = cosines(embedding, weight)
        angle = (torch.arccos(target_of(cos, label)) - 0.4 * quality).clip(1e-3, math.pi - 1e-3)
        target = torch.cos(angle) - (0.4 * quality + 0.4)
        return cross_entropy(SCALE * with_target(cos, label, target), label)


class DenseMagFace(DenseVariant):
    def loss(self, embedding, weight, label, classes, step):
        norm = embedding.norm(dim=1).clamp(10, 110)
        margin = (0.8 - 0.45) / (110 - 10) * (norm - 10) + 0.45
        cos = cosines(embedding, weight)
        target_cos = target_of(cos, label)
        target = torch.where(target_cos > 0, torch.cos(torch.arccos(target_cos) + margin), target_cos)
        regular = 35 * (norm / 110**2 + 1 / norm).mean()
        return cross_entropy(SCALE * with_target(cos, label, target), label) + regular


class DenseCurricularFace(DenseVariant):
    def __init__(self) -> None:
        self.t = 0.0

    def loss(self, embedding, weight, label, classes, step):
        cos = cosines(embedding, weight)
        target_cos = target_of(cos, label)
        self.t = 0.01 * target_cos.mean().item() + 0.99 * self.t
        shifted = torch.cos(torch.arccos(target_cos) + 0.5)
        target = torch.where(
            torch.arccos(target_cos) + 0.5 > math.pi, target_cos - 0.5 * math.sin(0.5), shifted
        )
        hard = torch.where(cos > shifted.detach()[:, None], cos * (self.t + cos), cos)
        return cross_entropy(SCALE * with_target(hard, label, target), label)


class DenseElasticFace(DenseVariant):
    def __init__(self, arc: bool, margin: float) -> None:
        self.arc, self.margin = arc, margin

    def loss(self, embedding, weight, label, classes, step):
        cos = cosines(embedding, weight)
        margin = self.margin + 0.05 * normal(torch.arange(len(label)), key_of(9, step, 0))
        target_cos = target_of(cos, label)
        target = torch.cos(torch.arccos(target_cos) + margin) if self.arc else target_cos - margin
        return cross_entropy(SCALE * with_target(cos, label, target), label)


class SteepAt0(Margin):
    """Margin whose slope is NaN at 0, the cosine that a rank has for the target classes of the others."""

    def target(self, cos: Tensor, norm: Tensor | None = None) -> Tensor:
        return cos.sign() * cos.abs().sqrt()


def of_the_batch(cos: Tensor) -> Tensor:
    """Margin that grows with the mean target cosine of the batch."""
    return cos - 0.2 * (1 + cos.detach().mean())


class DenseFunction(DenseVariant):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def loss(self, embedding, weight, label, classes, step):
        cos = cosines(embedding, weight)
        return cross_entropy(SCALE * with_target(cos, label, self.function(target_of(cos, label))), label)


STEEP_AT_0, OF_THE_BATCH = f"{__name__}:SteepAt0", f"{__name__}:of_the_batch"
own_parts.allow([STEEP_AT_0, OF_THE_BATCH])


@dataclass(frozen=True)
class Variant:
    """Variant of the head: the options to build it, and its oracle."""

    margin: dict[str, Any]
    oracle: Callable[[int, float], DenseVariant]
    head: dict[str, Any]

    def margin_arguments(self) -> dict[str, Any]:
        margin = {"scale": SCALE} | self.margin
        return {"margin": margin_settings(**margin), "margin_seed": 9}


VARIANTS = {
    "adaface": Variant({"type": "adaface"}, lambda classes, rate: DenseAdaFace(), {}),
    "magface": Variant({"type": "magface"}, lambda classes, rate: DenseMagFace(), {}),
    "curricularface": Variant({"type": "curricularface"}, lambda classes, rate: DenseCurricularFace(), {}),
    "elastic arcface": Variant(
        {"type": "elastic_arcface"}, lambda classes, rate: DenseElasticFace(True, 0.5), {}
    ),
    "elastic cosface": Variant(
        {"type": "elastic_cosface"}, lambda classes, rate: DenseElasticFace(False, 0.35), {}
    ),
    "elastic cosface around 0": Variant(
        {"type": "elastic_cosface", "m3": 0.0},
        lambda classes, rate: DenseElasticFace(False, 0.0),
        {},
    ),
    "steep at 0": Variant({"type": STEEP_AT_0}, lambda classes, rate: DenseFunction(SteepAt0().target), {}),
    "of the batch": Variant({"type": OF_THE_BATCH}, lambda classes, rate: DenseFunction(of_the_batch), {}),
}

HEADS = VARIANTS | {
    name: Variant(
        {"type": "combined", "m2": 0.0, "m3": 0.0} | margin,
        lambda classes, rate, margin=margin: DenseMargin(margin),
        {},
    )
    for name, margin in MARGINS.items()
}
CASES = [(name, rate) for name in HEADS for rate in (1.0, 0.4)] + [(name, 0.0) for name in MARGINS]
"""Heads and sample rates."""
