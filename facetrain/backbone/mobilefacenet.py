"""MobileFaceNet (Chen et al., arXiv 1804.07573) in the sizes and with the parameter names of arcface_torch."""

# B batch   D embedding

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.backbone.prelu import PReLU
from facetrain.backbone.recompute import run_block
from facetrain.errors import ModelError


class _Layers(nn.Module):
    """Modules in a row, under the name that arcface_torch's weights have."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels, …) through the modules."""
        return self.layers(x)


class ConvBlock(_Layers):
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
        conv = nn.Conv2d(channels_in, channels, kernel, stride, padding, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(channels), *([] if linear else [PReLU(channels)]))


class DepthWise(_Layers):
    """Inverted residual block: 1×1 expansion, 3×3 depthwise convolution, 1×1 projection; optionally a shortcut."""

    def __init__(self, channels_in: int, channels: int, inner: int, stride: int, *, residual: bool) -> None:
        super().__init__(
            ConvBlock(channels_in, inner),
            ConvBlock(inner, inner, 3, stride, 1, groups=inner),
            ConvBlock(inner, channels, linear=True),
        )
        self._residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels_in, H, W) to (B, channels, H / stride, W / stride)."""
        y = super().forward(x)
        return x + y if self._residual else y


def _residual(channels: int, depth: int, inner: int) -> nn.Module:
    """Return a sequence of depthwise blocks with shortcuts."""
    return _Layers(*(DepthWise(channels, channels, inner, 1, residual=True) for _ in range(depth)))


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
        # The published small networks have one grouped convolution in place of the first stage.
        single = layers[0] == 1
        second = (
            ConvBlock(narrow, narrow, 3, 1, 1, groups=64) if single else _residual(narrow, layers[0], 128)
        )
        self.layers = nn.ModuleList(
            [
                ConvBlock(3, narrow, 3, 2, 1),
                second,
                DepthWise(narrow, narrow, 128, 2, residual=False),
                _residual(narrow, layers[1], 128),
                DepthWise(narrow, wide, 256, 2, residual=False),
                _residual(wide, layers[2], 256),
                DepthWise(wide, wide, 512, 2, residual=False),
                _residual(wide, layers[3], 256),
            ]
        )
        self.conv_sep = ConvBlock(wide, 512)
        self.features = _Layers(
            ConvBlock(512, 512, side, groups=512, linear=True),  # one weight for each position and channel
            nn.Flatten(),
            nn.Linear(512, self.embedding_size, bias=False),
            nn.BatchNorm1d(self.embedding_size),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
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

    def last_layers(self) -> tuple[str, ...]:
        """Return the names of the layers of the neck."""
        return "conv_sep.", "features."

    def neck(self, feature: Tensor) -> Tensor:
        """Map the trunk's features to embeddings (B, D)."""
        return self.features(self.conv_sep(feature))
