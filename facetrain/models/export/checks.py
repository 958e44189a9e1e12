"""Checks that the export formats share: the kind of network before, the embeddings of the file after."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from facetrain.errors import ModelError, RunError
from facetrain.models.model_file import EmbeddingModel
from facetrain.models.onnx_network import OnnxNetwork

TOLERANCE = 1e-3
"""Largest difference that `compare_embeddings` accepts. Other kernels round differently: 1e-6 to 1e-5 is usual."""
NUM_IMAGES = 5
"""Images for the comparison; not the number with which the network is traced, to test the free batch size."""


def require_torch_network(model: EmbeddingModel) -> None:
    """Refuse a network that onnxruntime runs: there are no torch operations to export.

    Raises:
        ModelError: the model was opened from an ONNX file.
    """
    if isinstance(model.network, OnnxNetwork):
        raise ModelError(f"{model.description}: cannot be exported; give the model that it was exported from")


def example_pixels(model: EmbeddingModel, count: int) -> Tensor:
    """Return random uint8 images (N, H, W, 3) of the size that a model takes, the same at every call."""
    shape = (count, model.image_size, model.image_size, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def example_landmarks(model: EmbeddingModel, count: int) -> tuple[Tensor, ...]:
    """Return the further inputs of a model: random landmarks (N, 5, 2), the same at every call, if it takes them."""
    if not model.takes_landmarks:
        return ()
    return (torch.rand(count, 5, 2, generator=torch.Generator().manual_seed(1)),)


def compare_embeddings(path: Path, found_ND: Tensor, expected_ND: Tensor) -> float:
    """Return the largest difference, as a share of the largest number in the expected embeddings.

    Raises:
        RunError: it is more than `TOLERANCE`, or not a number.
    """
    difference = float((found_ND - expected_ND).abs().max() / expected_ND.abs().max())
    # "not <" instead of ">=": the comparison with NaN is false.
    if not difference < TOLERANCE:
        raise RunError(
            f"{path}: not written: its embeddings differ from those of the network by {difference:.2g} of their size, "
            f"more than {TOLERANCE:g}; try another version of torch or onnxruntime"
        )
    return difference
