"""Network in the form that an exported file has: it also normalizes pixels or embeddings, as the user asks."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

import json

from torch import Tensor, nn

from facetrain.models.embedding_model import EmbeddingModel
from facetrain.models.export.formats import ExportOptions
from facetrain.models.model_file import public_description
from facetrain.models.preprocessing import PREPROCESSING_KEY, RAW_PIXELS


class Deployed(nn.Module):
    """A network with the normalization of pixels before it, or of embeddings after it, as the options ask."""

    def __init__(self, model: EmbeddingModel, options: ExportOptions) -> None:
        super().__init__()
        self.network = model.network
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


def file_metadata(model: EmbeddingModel, options: ExportOptions) -> dict[str, str]:
    """Return the metadata of an exported file: JSON by key, as docs/models.md describes it."""
    given = RAW_PIXELS | {"layout": "NHWC"} if options.from_pixels else model.preprocessing
    layout = {
        "input": f"{'uint8' if options.from_pixels else 'float32'} {given['layout']}",
        "unit": options.unit,
    }
    metadata = public_description(model.metadata) | {PREPROCESSING_KEY: given | layout}
    return {name: json.dumps(value) for name, value in metadata.items()}
