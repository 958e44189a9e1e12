"""Base class of the backbones, recomputation of a block's activations, and resizing of feature maps."""

# B batch   C channels   H, W height and width   D embedding

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from facetrain.backbone.sample_draws import dropout, random_keys
from facetrain.errors import ModelError

_LEAST_SIDE = 2
"""Least side of the last feature map: one cell would be the same everywhere after the interpolation."""


class Backbone(nn.Module):
    """Network from face images to embeddings, in two halves.

    The trunk may run in 16 bits. The neck runs in float32, because it sums over tens of thousands of features. The
    wrapper that trains or evaluates the network sets these precisions (`training/precision.py`); a backbone contains no
    autocast.
    """

    stride: ClassVar[int] = 16
    """Pixels of the image's side for each cell of the last feature map's side."""
    takes_landmarks: ClassVar[bool] = False
    """Whether `trunk` and `forward` take a second argument: the landmarks of the faces, (B, 5, 2), in units of the
    image's sides, see `face_landmarks.py`. Without it they use the landmarks of aligned faces."""

    def __init__(
        self,
        *,
        embedding_size: int = 512,
        image_size: int = 112,
        dropout: float = 0.0,
        checkpoint_activations: bool = False,
    ) -> None:
        """Take the options of every backbone, which the section `model` of the config describes."""
        super().__init__()
        self.embedding_size, self.image_size = embedding_size, image_size
        self._dropout, self._recompute = dropout, checkpoint_activations
        self.new_layers: tuple[str, ...] = ()
        """Prefixes of the parameters that the published weights lack; they are trained whole beside adapters."""

    @property
    def draws_by_sample(self) -> bool:
        """Whether `trunk` takes `key_B` in training: a random key of each sample, int64 (B,).

        From it, it draws what it drops. Without it, it draws keys.
        """
        return self._dropout > 0

    def drop(self, x: Tensor, key_B: Tensor | None) -> Tensor:
        """Apply dropout to features (B, …) of samples with these keys, see `draws_by_sample`, in training."""
        if not self.training or not self._dropout:
            return x
        return dropout(x, self._dropout, random_keys(x) if key_B is None else key_B)

    def trunk(self, image_BCHW: Tensor) -> Tensor:
        """Map normalized images (B, 3, H, W) to features."""
        raise NotImplementedError

    def neck(self, feature: Tensor) -> Tensor:
        """Map the trunk's features to embeddings (B, D)."""
        raise NotImplementedError

    def regions(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the trunk's modules in order, each with the name of its method that maps (B, …) to (B, …).

        The method may take further tensors after the first one.
        With `train.compile` each of these methods is compiled on its own; modules with the same code share one
        compilation.
        """
        raise NotImplementedError

    def layer_prefixes(self) -> list[tuple[str, ...]]:
        """Return the prefixes of the parameter names of each layer, from the image on.

        A layer is the stem, or a block of the trunk. All other parameters belong to the last layer: the norm at the
        end of the trunk, and the neck.
        """
        raise NotImplementedError

    def check_image_size(self, size: int) -> None:
        """Check that the network can also be trained on images of `size` × `size` pixels (`train.stages`).

        Raises:
            ModelError: it cannot.
        """
        half, least = self.stride // 2, (_LEAST_SIDE - 1) * self.stride + self.stride // 2
        # A feature map begins at the first pixel, and its last cell reaches beyond the border by half a cell at most.
        if size % half or size < least:
            nearest = max(round(size / half) * half, least)
            raise ModelError(
                f"{size} pixels do not fit the backbone, which has a feature for {self.stride} × {self.stride} pixels; "
                f"use a multiple of {half} from {least} on, for example {nearest}"
            )

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map normalized images (B, 3, H, W) to embeddings (B, D)."""
        return self.neck(self.trunk(image_BCHW))


def resize_features(feature_BCHW: Tensor, side: int) -> Tensor:
    """Return feature maps (B, C, side, side): the given ones, or float32 ones by bilinear interpolation.

    In a training stage of smaller images, the last layer gets features of as many cells as in the rest of the run. The
    interpolation has no parameters, so all weights fit the final size. Networks in evaluation mode do not
    call it: they take images of the final size only.
    """
    height, width = feature_BCHW.shape[2:]
    if height == width == side:
        return feature_BCHW
    # Two products with the matrix that `interpolate` applies along an axis. The backward pass of `interpolate` itself
    # adds in another order in each run on a GPU.
    with torch.autocast(feature_BCHW.device.type, enabled=False):
        rows, columns = (_interpolation(cells, side, feature_BCHW.device) for cells in (height, width))
        return rows.T @ (feature_BCHW.float() @ columns)


def _interpolation(cells: int, side: int, device: torch.device) -> Tensor:
    """Return the weights of `cells` values in each of `side` interpolated ones, (cells, side)."""
    return F.interpolate(torch.eye(cells, device=device)[None], side, mode="linear")[0]


def run_block(block: nn.Module, x: Tensor, *inputs: Tensor | None, recompute: bool) -> Tensor:
    """Run a block; with `recompute`, store only its inputs and run the block again in the backward pass."""
    if not (recompute and x.requires_grad):
        output: Tensor = block(x, *inputs)
    else:
        contexts = nullcontext(), _restored_buffers(block)
        output = checkpoint(block, x, *inputs, use_reentrant=False, context_fn=lambda: contexts)
    return output


@contextmanager
def _restored_buffers(block: nn.Module) -> Iterator[None]:
    """Restore the block's buffers on exit: the first run has already updated the batch norms' running statistics."""
    before = [buffer.clone() for buffer in block.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(block.buffers(), before, strict=True):
                buffer.copy_(value)
