"""Test oracle of centers that follow a teacher: the rule of AdaDistill, image by image."""

from __future__ import annotations

import torch
from torch import Tensor

_cosine = torch.nn.functional.cosine_similarity


def move_plainly(centers: Tensor, student: Tensor, teacher: Tensor, label: Tensor) -> None:
    """Move centers (K, T) in place by the images of a batch in their order; all factors are of the centers before."""
    near = _cosine(centers[label], teacher).clamp(1e-6, 1)
    factors = (_cosine(student, teacher) * near).clamp(1e-6, 1)
    for number, factor, image in zip(label.tolist(), factors, teacher, strict=True):
        centers[number] = factor * centers[number] + (1 - factor) * image / image.norm()
