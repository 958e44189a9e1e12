"""Export to a torch.export program (.pt2), which needs no Python code of facetrain."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from facetrain.files import error_reason
from facetrain.models.embedding_model import EmbeddingModel
from facetrain.models.export.example_inputs import example_landmarks
from facetrain.models.export.formats import ExportOptions, Runtime


def write(model: EmbeddingModel, path: Path, options: ExportOptions) -> Runtime:
    """Write a .pt2 file with a free batch size.

    It maps float32 images (N, 3, H, W), as the network takes them, to embeddings (N, D). The program of a network with
    KP-RPE takes landmarks (N, 5, 2) after the images.
    """
    example = (torch.zeros(2, 3, model.image_size, model.image_size), *example_landmarks(model, 2))
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(
        model.network.eval().cpu(), example, dynamic_shapes=({0: batch},) * len(example)
    )
    try:
        torch.export.save(program, path)
    except RuntimeError as error:  # torch's own file writer, for a full disk
        raise OSError(error_reason(error)) from error
    # Safe only for a file that was written just now: a .pt2 from elsewhere can run code when it is loaded.
    with path.open("rb") as file:
        network = torch.export.load(file).module()

    @torch.no_grad()
    def run(*inputs: np.ndarray) -> np.ndarray:
        embeddings: np.ndarray = network(*map(torch.from_numpy, inputs)).numpy()
        return embeddings

    return Runtime(f"torch.export {torch.version.__version__}", run)
