"""Teacher of a network: another network that embeds the images of each step."""

# B local batch   T embedding of the teacher

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.data.images.normalize import normalize
from facetrain.data.loading.loader import Batch
from facetrain.models.embedding_model import EmbeddingModel


class LiveTeacher:
    """Network that embeds the images that the student sees, with their augmentations."""

    def __init__(
        self,
        model: EmbeddingModel,
        digest: str,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Take a model in evaluation mode, on the device of the images, and the context that it computes in."""
        self._model, self._autocast, self.digest = model, autocast, digest
        self.embedding_size = model.embedding_size
        model.network.requires_grad_(False)

    @torch.no_grad()
    def __call__(self, batch: Batch, image_BCHW: Tensor) -> Tensor:
        """Return the embeddings (B, T), float32, of the augmented images of a batch (B, 3, H, W) in [−1, 1]."""
        size = self._model.image_size
        if image_BCHW.shape[2] != size:
            # With a filter: a teacher for smaller images would otherwise see aliasing that it was not trained on.
            image_BCHW = F.interpolate(image_BCHW, (size, size), mode="bilinear", antialias=True)
        with self._autocast():
            embedding_BT: Tensor = self._model.network(self._prepared(image_BCHW))
        return embedding_BT.float()

    def _prepared(self, image_BCHW: Tensor) -> Tensor:
        """Return the input of the network for images in [−1, 1]."""
        if self._model.prepare is normalize:
            return image_BCHW
        # Another order of colors, scale or dtype: through pixels, which every model takes.
        pixel_BHWC = (
            image_BCHW.mul(127.5).add(127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        )
        return self._model.prepare(pixel_BHWC.contiguous())
