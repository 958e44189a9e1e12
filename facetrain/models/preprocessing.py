"""Inputs of networks: what the pixels of an image become before the first layer."""

# B images   H image size

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from facetrain.data.images.normalize import normalize
from facetrain.errors import ModelError

PREPROCESSING_KEY = "preprocessing"
"""Key of a model's description: one of the inputs below."""
PREPROCESSING: dict[str, Any] = {"channels": "RGB", "mean": 127.5, "scale": 127.5, "layout": "NCHW"}
"""Input of facetrain's backbones: (x − mean) / scale for pixels x from 0 to 255."""
RAW_PIXELS = PREPROCESSING | {"mean": 0, "scale": 1}
"""Input of a network that normalizes the pixels itself."""
FRACTIONS = PREPROCESSING | {"mean": 0, "scale": 255}
"""Input of MagFace's networks."""
NAMES_OF_SCALES = {1: "pixels", 127.5: "normalized images", 255: "pixels / 255"}
"""Scale of an input -> its name in a message."""


def prepare_of(preprocessing: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Return the function that maps images, uint8 (B, H, H, 3), to the input of a network, float32 (B, 3, H, H)."""
    return {1: float_pixels, 255: _fractions}.get(preprocessing["scale"], normalize)


def uint8_pixels(image_BHHC: Tensor) -> Tensor:
    """Map uint8 (B, H, H, 3) to uint8 (B, 3, H, H)."""
    return image_BHHC.permute(0, 3, 1, 2)


def float_pixels(image_BHHC: Tensor) -> Tensor:
    """Map uint8 (B, H, H, 3) to float32 (B, 3, H, H) from 0 to 255."""
    return uint8_pixels(image_BHHC).float()


def _fractions(image_BHHC: Tensor) -> Tensor:
    """Map uint8 (B, H, H, 3) to float32 (B, 3, H, H) from 0 to 1."""
    return float_pixels(image_BHHC).div_(255)


def require_trainable_input(description: dict[str, Any], origin: str) -> None:
    """Refuse weights for another input than that of the backbones of a run.

    Raises:
        ModelError: no weights of the first convolution could make up for it: its zero padding means another color.
    """
    if description.get(PREPROCESSING_KEY, PREPROCESSING) == FRACTIONS:
        raise ModelError(
            f"{origin}: takes pixels / 255; facetrain trains networks that take (pixels − 127.5) / 127.5: begin with "
            "another model, and give this one as distill.teacher"
        )
