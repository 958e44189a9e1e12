#!/usr/bin/env python3
"""arcface_torch's training loop on one process, for the comparison in recipes/same_minutes/run.py.

The step is that of benchmarks/arcface_torch.py. Around it, as in train_v2.py: images in random order, mirrored with
probability one half and not changed otherwise, an incomplete last batch left out, a rate that falls linearly to 0.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.arcface_torch import ArcfaceTorchStep
from facetrain.api import Dataset
from facetrain.backbone.zoo import build_backbone
from facetrain.data.images.augment import normalize
from facetrain.data.images.decode import resize_square
from facetrain.models.model_file import describe_backbone, save_model


class _Faces(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images, uint8 (S, S, 3) in RGB and mirrored at random, and their labels."""

    def __init__(self, path: Path, side: int) -> None:
        self.faces, self._side = Dataset(path), side

    def __len__(self) -> int:
        return len(self.faces)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image_HWC, label = self.faces[index]
        image_SSC = torch.from_numpy(resize_square(image_HWC, self._side))
        return image_SSC.flip(1) if torch.rand(()) < 0.5 else image_SSC, label


def train(options: argparse.Namespace) -> None:
    """Train a network, and write it as a model file."""
    torch.manual_seed(options.seed)
    network = {"name": "iresnet", "layers": [1, 1, 1, 1], "widths": [16, 32, 64, 96]}
    network |= {"embedding_size": 128, "image_size": options.image_size}
    data = _Faces(options.data, options.image_size)
    backbone = build_backbone(**network)
    step = ArcfaceTorchStep(backbone, data.faces.num_identities, options.precision, torch.device("cpu"))
    for group in step.optimizer.param_groups:
        group["lr"] = options.lr
    batches = DataLoader(data, options.batch, shuffle=True, drop_last=True)
    schedule = torch.optim.lr_scheduler.PolynomialLR(step.optimizer, options.epochs * len(batches))
    backbone.train()
    for epoch in range(options.epochs):
        losses = []
        for image_BSSC, label_B in batches:
            losses.append(step(normalize(image_BSSC).contiguous(), label_B))
            schedule.step()
        print(f"epoch {epoch + 1} of {options.epochs}: loss {np.mean(losses):.3f}", flush=True)
    save_model(options.output, backbone.state_dict(), describe_backbone(**network))


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="dataset, in any format")
    parser.add_argument("--output", type=Path, required=True, help="model file to write, .safetensors")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--image-size", type=int, default=56)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
