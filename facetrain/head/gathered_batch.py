"""Batch of all ranks: its embeddings, gathered with their norms, and its labels."""

# B local batch   G gathered batch   D embedding   X embedding and norm, or embedding alone

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.distributed import collectives
from facetrain.errors import DataError


def start_gather(embedding_BD: Tensor, *, with_norms: bool) -> collectives.GatheredRows:
    """Start to gather unit embeddings, each followed by its norm if requested: (G, X). Collective."""
    # The squares of 16-bit numbers overflow fp16 from 256 on.
    embedding_BD = embedding_BD.to(torch.promote_types(embedding_BD.dtype, torch.float32))
    unit_BD = F.normalize(embedding_BD)
    if not with_norms:
        return collectives.GatheredRows(unit_BD)
    # One message for both: a second gather would wait for the network once more.
    norm_B = torch.linalg.vector_norm(embedding_BD, dim=1)
    return collectives.GatheredRows(torch.cat([unit_BD, norm_B[:, None]], dim=1))


class LabelGather:
    """Gathers the labels of each step, some time before the step if the caller can."""

    def __init__(self) -> None:
        self._expected: collectives.GatheredRows | None = None

    def expect(self, label_B: Tensor) -> None:
        """Start to gather the labels of the next call of `gather`. Collective."""
        self._expected = collectives.GatheredRows(label_B)

    def gather(self, label_B: Tensor) -> Tensor:
        """Return the labels of all ranks (G,): the expected ones where these are, else `label_B`. Collective."""
        # Taken once: labels that were expected for a step must not serve the next.
        expected, self._expected = self._expected, None
        return collectives.gather(label_B).flatten() if expected is None else expected.wait()


def check_labels(labels: np.ndarray, num_classes: int) -> None:
    """Check that every label is one of `num_classes` classes.

    Raises:
        DataError: one is not.
    """
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if len(wrong):
        raise DataError(
            f"label {int(wrong[0])} is outside the {num_classes:,} classes of the head (0 to "
            f"{num_classes - 1:,}); {len(wrong):,} labels of the batch are invalid; check "
            "data.num_classes and the dataset"
        )
