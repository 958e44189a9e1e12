"""IResNet, the improved ResNet (Duta et al., arXiv 2004.04989) in the variants of other face recognizers.

Parameter names and their order are as in arcface_torch, so its published weights load.
"""

# B batch   C channels   D embedding

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.backbone.prelu import PReLU
from facetrain.backbone.recompute import run_block

WIDTHS = (64, 128, 256, 512)
"""Channels per stage."""
_SQUEEZE_REDUCTION = 16


class SqueezeExcitation(nn.Module):
    """Factor on each channel, from the means of all channels (Hu et al., "Squeeze-and-excitation", 1709.01507)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, channels // _SQUEEZE_REDUCTION, 1, bias=False)
        self.fc2 = nn.Conv2d(channels // _SQUEEZE_REDUCTION, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels, H, W) to the same shape."""
        mean = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.fc2(torch.relu(self.fc1(mean))))


class IBasicBlock(nn.Module):
    """Residual block: batch norm, convolution, batch norm, PReLU, convolution, batch norm, plus the shortcut.

    Where the stride is not 1 or the channels change, the shortcut has a convolution and a batch norm. With
    `subsample_shortcut`, a shortcut that keeps its channels takes every `stride`-th pixel instead. Without
    `norm_between`, no batch norm follows the first convolution. With `squeeze`, a factor on each channel ends the
    branch.
    """

    def __init__(
        self,
        channels_in: int,
        channels: int,
        stride: int,
        *,
        subsample_shortcut: bool = False,
        norm_between: bool = True,
        squeeze: bool = False,
    ) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels) if norm_between else nn.Identity()
        self.prelu = PReLU(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.se = SqueezeExcitation(channels) if squeeze else None
        self.downsample: nn.Module | None = None
        if subsample_shortcut and stride != 1 and channels_in == channels:
            self.downsample = nn.MaxPool2d(1, stride)
        elif stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels_in, H, W) to (B, channels, H / stride, W / stride)."""
        y = self.prelu(self.bn2(self.conv1(self.bn1(x))))
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.bn3(self.conv2(y))
        return (y if self.se is None else self.se(y)) + shortcut


class IResNet(Backbone):
    """Stem, four stages that each halve height and width, and a linear layer between two batch norms.

    With a `stem_stride` of 2, the stem halves them, too: the blocks then compute on a quarter of the pixels.

    With `subsample_shortcut` it is the IR network of AdaFace and CVLface (mk-minchul/AdaFace, net.py), which differs
    from arcface_torch's in one layer: the shortcut of the first block, from 64 to 64 channels, has no weights. It also
    starts with smaller weights: before a batch norm, a step of the same rate turns them further. With `squeeze` too it
    is the IR-SE network of TFace and CVLface, and without `norm_between` that of InsightFace_Pytorch and face.evoLVe
    (TreB1EN/InsightFace_Pytorch, model.py).
    """

    def __init__(
        self,
        layers: Sequence[int],
        widths: Sequence[int] = WIDTHS,
        *,
        stem_stride: int = 1,
        subsample_shortcut: bool = False,
        norm_between: bool = True,
        squeeze: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.subsample_shortcut = subsample_shortcut
        self.conv1 = nn.Conv2d(3, widths[0], 3, stem_stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.prelu = PReLU(widths[0])
        side, channels = -(-self.image_size // stem_stride), widths[0]
        for number, (depth, width) in enumerate(zip(layers, widths, strict=True), start=1):
            blocks = [
                IBasicBlock(
                    channels if n == 0 else width,
                    width,
                    2 if n == 0 else 1,
                    subsample_shortcut=subsample_shortcut,
                    norm_between=norm_between,
                    squeeze=squeeze,
                )
                for n in range(depth)
            ]
            self.add_module(f"layer{number}", nn.Sequential(*blocks))
            side, channels = (side + 1) // 2, width
        self.bn2 = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels * side * side, self.embedding_size)
        self.features = nn.BatchNorm1d(self.embedding_size)
        # The scale is fixed at 1: the head normalizes embeddings and would cancel a scale common to all features.
        nn.init.ones_(self.features.weight)
        self.features.weight.requires_grad_(False)
        for module in self.modules():
            if subsample_shortcut and isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0, 0.1)

    def trunk(self, image_BCHW: Tensor, *, key_B: Tensor | None = None) -> Tensor:
        """Map normalized images (B, 3, H, W) to flat features (B, C·S·S), S = `image_size` / 16 / `stem_stride`."""
        x = self.stem(image_BCHW)
        for block in self.blocks():
            x = run_block(block, x, recompute=self._recompute)
        return self.drop(self.bn2(x).flatten(1), key_B)

    def stem(self, image_BCHW: Tensor) -> Tensor:
        """Map normalized images (B, 3, H, W) to (B, C, H / `stem_stride`, W / `stem_stride`)."""
        return self.prelu(self.bn1(self.conv1(image_BCHW)))

    def regions(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the stem and each block."""
        yield self, "stem"
        yield from ((block, "forward") for block in self.blocks())

    def blocks(self) -> Iterator[IBasicBlock]:
        """Yield the blocks of the four stages in order."""
        for number in range(1, 5):
            for block in self.get_submodule(f"layer{number}").children():
                assert isinstance(block, IBasicBlock)
                yield block

    def neck(self, feature: Tensor) -> Tensor:
        """Map flat features to embeddings (B, D)."""
        return self.features(self.fc(feature))
