"""Network in the form that an exported file has: it also normalizes pixels or embeddings, as the user asks."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

from facetrain.models.export.formats import ExportOptions
from facetrain.models.model_file import EmbeddingModel


class Deployed(nn.Module):
    """A network with the normalization of pixels before it, or of embeddings after it, as the options ask."""

    def __init__(
        self, model: EmbeddingModel, options: ExportOptions, *, network: nn.Module | None = None
    ) -> None:
        """Take `network` in place of the model's, for a faster form of it."""
        super().__init__()
        self.network = network or model.network
        self._mean, self._scale = model.preprocessing["mean"], model.preprocessing["scale"]
        self._from_pixels, self._unit = options.from_pixels, options.unit

    def forward(self, image: Tensor, landmarks: Tensor | None = None) -> Tensor:
        """Map float32 (N, 3, H, W), or uint8 (N, H, W, 3) with `from_pixels`, to embeddings (N, D).

        A network with KP-RPE also takes landmarks (N, 5, 2), x and y as fractions of the image's sides.
        """
        if self._from_pixels:
            image = (image.permute(0, 3, 1, 2).float() - self._mean) / self._scale
        embedding = self.network(image) if landmarks is None else self.network(image, landmarks)
        return nn.functional.normalize(embedding) if self._unit else embedding


def inputs_of_file(model: EmbeddingModel, options: ExportOptions, pixels_NHWC: Tensor) -> tuple[Tensor, ...]:
    """Return the inputs of the exported file for uint8 RGB images (N, H, W, 3): the images, and example landmarks."""
    image = (pixels_NHWC if options.from_pixels else model.prepare(pixels_NHWC)).contiguous()
    return (image, *example_landmarks(model, len(image)))


def example_pixels(model: EmbeddingModel, count: int) -> Tensor:
    """Return random uint8 images (N, H, W, 3) of the size that a model takes, the same at every call."""
    shape = (count, model.image_size, model.image_size, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def example_landmarks(model: EmbeddingModel, count: int) -> tuple[Tensor, ...]:
    """Return the further inputs of a model: random landmarks (N, 5, 2), the same at every call, if it takes them."""
    if not model.takes_landmarks:
        return ()
    return (torch.rand(count, 5, 2, generator=torch.Generator().manual_seed(1)),)


def file_metadata(model: EmbeddingModel, options: ExportOptions) -> dict[str, str]:
    """Return the metadata of an exported file: JSON by key, as docs/models.md describes it."""
    layout = {"input": "uint8 NHWC" if options.from_pixels else "float32 NCHW", "unit": options.unit}
    metadata = model.metadata | {"preprocessing": model.preprocessing | layout}
    return {name: json.dumps(value) for name, value in metadata.items()}
