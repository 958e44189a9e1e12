"""MobileFaceNet (Chen et al., arXiv 1804.07573) in the sizes and with the parameter names of arcface_torch."""

# B batch   D embedding

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from facetrain.backbone.base import Backbone, resize_features, run_block
from facetrain.backbone.prelu import PReLU
from facetrain.errors import ModelError


class ConvBlock(nn.Module):
    """Convolution and batch norm, followed by PReLU unless `linear`."""

    def __init__(
        self,
        channels_in: int,
        channels: int,
        kernel: int = 1,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        *,
        linear: bool = False,
    ) -> None:
        super().__init__()
        conv = nn.Conv2d(channels_in, channels, kernel, stride, padding, groups=groups, bias=False)
        act = [] if linear else [PReLU(channels)]
        self.layers = nn.Sequential(conv, nn.BatchNorm2d(channels), *act)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels_in, H, W) to (B, channels, …)."""
        return self.layers(x)


class DepthWise(nn.Module):
    """Inverted residual block: 1×1 expansion, 3×3 depthwise convolution, 1×1 projection; optionally a shortcut."""

    def __init__(self, channels_in: int, channels: int, inner: int, stride: int, *, residual: bool) -> None:
        super().__init__()
        self._residual = residual
        self.layers = nn.Sequential(
            ConvBlock(channels_in, inner),
            ConvBlock(inner, inner, 3, stride, 1, groups=inner),
            ConvBlock(inner, channels, linear=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels_in, H, W) to (B, channels, H / stride, W / stride)."""
        y = self.layers(x)
        return x + y if self._residual else y


class Residual(nn.Module):
    """Sequence of depthwise blocks with shortcuts."""

    def __init__(self, channels: int, depth: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(DepthWise(channels, channels, inner, 1, residual=True) for _ in range(depth))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels, H, W) to the same shape."""
        return self.layers(x)


class GlobalDepthWise(nn.Module):
    """Global depthwise convolution, followed by a linear layer and batch norm."""

    def __init__(self, channels: int, side: int, embedding_size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            ConvBlock(channels, channels, side, groups=channels, linear=True),
            nn.Flatten(),
            nn.Linear(channels, embedding_size, bias=False),
            nn.BatchNorm1d(embedding_size),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels, side, side) to (B, embedding_size)."""
        return self.layers(x)


class MobileFaceNet(Backbone):
    """Small network for phones; `scale` multiplies its channels by 64 and 128."""

    def __init__(
        self,
        layers: Sequence[int],
        scale: int,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if self._dropout:
            raise ModelError(
                f"model.dropout: MobileFaceNet has no dropout layer, got {self._dropout}; set it to 0"
            )
        narrow, wide, side = 64 * scale, 128 * scale, self.image_size
        for _ in range(4):
            side = (side + 1) // 2
        second = (
            ConvBlock(narrow, narrow, 3, 1, 1, groups=64)
            if layers[0] == 1
            else Residual(narrow, layers[0], 128)
        )
        self.layers = nn.ModuleList(
            [
                ConvBlock(3, narrow, 3, 2, 1),
                second,
                DepthWise(narrow, narrow, 128, 2, residual=False),
                Residual(narrow, layers[1], 128),
                DepthWise(narrow, wide, 256, 2, residual=False),
                Residual(wide, layers[2], 256),
                DepthWise(wide, wide, 512, 2, residual=False),
                Residual(wide, layers[3], 256),
            ]
        )
        self._side = side
        self.conv_sep = ConvBlock(wide, 512)
        self.features = GlobalDepthWise(512, side, self.embedding_size)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def trunk(self, image_BCHW: Tensor) -> Tensor:
        """Map normalized images (B, 3, H, W) to (B, channels, H / 16, W / 16)."""
        x = image_BCHW
        for layer in self.layers:
            x = run_block(layer, x, recompute=self._recompute)
        return x

    def regions(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield each layer."""
        yield from ((layer, "forward") for layer in self.layers)

    def layer_prefixes(self) -> list[tuple[str, ...]]:
        """Return the name of each layer of the trunk."""
        return [(f"layers.{n}.",) for n in range(len(self.layers))]

    def neck(self, feature: Tensor) -> Tensor:
        """Map the trunk's features to embeddings (B, D)."""
        x = self.conv_sep(feature)
        return self.features(resize_features(x, self._side) if self.training else x)
