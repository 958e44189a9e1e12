#!/usr/bin/env python3
"""arcface_torch's training loop on one process: `python -m benchmarks.arcface_torch_training --help`.

The step is that of benchmarks/arcface_torch.py. Around it, as in train_v2.py: images in random order, mirrored with
probability one half and not changed otherwise, an incomplete last batch left out, a rate that falls linearly to 0.
The images are decoded once and kept in memory, in favor of the baseline. benchmarks/same_minutes.py runs this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.arcface_torch import ArcfaceTorchStep
from facetrain.api import Dataset
from facetrain.backbone.zoo import build_backbone
from facetrain.data.images.decode import resize_square
from facetrain.data.images.normalize import normalize
from facetrain.models.model_file import describe_backbone, save_model

NETWORK: dict[str, Any] = {
    "name": "iresnet",
    "layers": [1, 1, 1, 1],
    "widths": [16, 32, 64, 96],
    "embedding_size": 128,
}
"""The network of recipes/speedrun and recipes/same_minutes."""


def train(
    data: Path,
    output: Path,
    epochs: int,
    seed: int = 0,
    lr: float = 0.02,
    batch: int = 128,
    image_size: int = 56,
    precision: str = "fp32",
) -> None:
    """Train a network on a dataset of any format, and write it as a model file (.safetensors)."""
    torch.manual_seed(seed)
    faces = Dataset(data)
    image_NSSC, label_N = _decode(faces, image_size)
    network = NETWORK | {"image_size": image_size}
    backbone = build_backbone(**network)
    step = ArcfaceTorchStep(backbone, faces.num_identities, precision, torch.device("cpu"))
    for group in step.optimizer.param_groups:
        group["lr"] = lr
    batches = len(faces) // batch
    schedule = torch.optim.lr_scheduler.PolynomialLR(step.optimizer, epochs * batches)
    backbone.train()
    for epoch in range(epochs):
        losses = []
        for chosen_B in torch.randperm(len(faces))[: batches * batch].split(batch):
            losses.append(step(_mirror_half(image_NSSC[chosen_B]), label_N[chosen_B]))
            schedule.step()
        print(f"epoch {epoch + 1} of {epochs}: loss {np.mean(losses):.3f}", flush=True)
    save_model(output, backbone.state_dict(), describe_backbone(**network))


def _decode(faces: Dataset, side: int) -> tuple[Tensor, Tensor]:
    """Return all images, uint8 (N, S, S, 3) in RGB, and their labels, int64 (N,)."""
    image_NSSC = torch.empty(len(faces), side, side, 3, dtype=torch.uint8)
    label_N = torch.empty(len(faces), dtype=torch.int64)
    for index in range(len(faces)):
        image_HWC, label_N[index] = faces[index]
        image_NSSC[index] = torch.from_numpy(resize_square(image_HWC, side))
    return image_NSSC, label_N


def _mirror_half(image_BSSC: Tensor) -> Tensor:
    """Return the images mirrored with probability one half, float32 (B, 3, S, S) in [−1, 1]."""
    mirrored_B = torch.rand(len(image_BSSC)) < 0.5
    image_BSSC[mirrored_B] = image_BSSC[mirrored_B].flip(2)
    return normalize(image_BSSC).contiguous()


if __name__ == "__main__":
    typer.run(train)
