"""torchvision's ResNets as backbones."""

# B batch   D embedding

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.backbone.recompute import run_block
from facetrain.errors import ModelError, install_torch
from facetrain.files import error_reason


class TorchvisionResNet(Backbone):
    """ResNet of torchvision whose classifier is replaced by an embedding layer and batch norm.

    Its features are averaged over the image, so it has no weights that depend on the size of the images.
    """

    def __init__(
        self,
        name: str,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        net: Any = _import_models().__dict__[name]()
        self.stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
        self.stages = nn.Sequential(net.layer1, net.layer2, net.layer3, net.layer4)
        self.pool = net.avgpool
        self.fc = nn.Linear(net.fc.in_features, self.embedding_size)
        self.features = nn.BatchNorm1d(self.embedding_size)
        # As in IResNet: the head would cancel this scale.
        self.features.weight.requires_grad_(False)

    def trunk(self, image_BCHW: Tensor, *, key_B: Tensor | None = None) -> Tensor:
        """Map normalized images (B, 3, H, W) to flat features."""
        x = self.stem(image_BCHW)
        for block in self._blocks():
            x = run_block(block, x, recompute=self._recompute)
        return self.drop(self.pool(x).flatten(1), key_B)

    def regions(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the stem and each block."""
        yield self.stem, "forward"
        yield from ((block, "forward") for block in self._blocks())

    def _blocks(self) -> Iterator[nn.Module]:
        return (block for stage in self.stages for block in stage.children())

    def neck(self, feature: Tensor) -> Tensor:
        """Map flat features to embeddings (B, D)."""
        return self.features(self.fc(feature))


def _import_models() -> Any:
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:
        raise ModelError(
            f"torchvision cannot be imported ({error_reason(error)}); {install_torch()}"
        ) from error
    return models
