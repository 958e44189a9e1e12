"""Map from the embeddings of an old model to those of a new one, so that a gallery needs no new enrollment.

The map is linear with a constant, learned by ridge regression on images that both models have embedded (arXiv
2604.07282).
"""

# N images   D embedding of the old model   E embedding of the new model

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from facetrain.embeddings.embedding_npz import NpzArray
from facetrain.embeddings.embeddings import (
    Embeddings,
    Rows,
    damage_as_error,
    require_fitting,
    warn_of_unknown_model,
)
from facetrain.embeddings.model_fingerprint import is_same_model
from facetrain.embeddings.normalization import l2_normalize, unit_rows
from facetrain.errors import DataError
from facetrain.files import new_file, open_regular, os_errors_as

_PENALTIES = 10.0 ** np.arange(-4, 4)
"""Penalties of the ridge regression, of which leave-one-out errors choose one."""
_ARRAYS = ("weight", "bias", "old", "new")


@dataclass(frozen=True)
class EmbeddingMap:
    """Linear map of unit embeddings; `load_map` opens one, and `facetrain align` learns one."""

    weight: np.ndarray
    """float32 (D, E)."""
    bias: np.ndarray
    """float32 (E,)."""
    old: np.ndarray
    """Fingerprint of the old model, (D,), see `model_fingerprint`."""
    new: np.ndarray
    """Fingerprint of the new model, (E,)."""
    path: Path = Path("map.npz")
    """File of the map, for messages."""

    def apply(self, embedding_ND: np.ndarray) -> np.ndarray:
        """Return unit embeddings that fit the new model: (N, D) of any length -> float32 (N, E); zeros of zeros.

        Raises:
            DataError: the embeddings have another size than those of the old model.
        """
        if embedding_ND.ndim != 2 or embedding_ND.shape[1] != len(self.weight):
            raise DataError(
                f"{self.path}: maps embeddings of size {len(self.weight)}, not of shape {embedding_ND.shape}"
            )
        mapped_NE = l2_normalize(unit_rows(embedding_ND).astype(np.float32) @ self.weight + self.bias)
        # A row of zeros has no face. With the bias it would become the mean face, and be similar to all.
        return np.where(embedding_ND.any(1, keepdims=True), mapped_NE, np.float32(0))

    def mapped(self, embeddings: Embeddings) -> Embeddings:
        """Return a gallery of the old model as one of the new model; its rows are mapped when they are read.

        Raises:
            DataError: the gallery is of another model than the old one.
        """
        warn_of_unknown_model(embeddings)
        if embeddings.size != len(self.weight) or not is_same_model(embeddings.model, self.old):
            raise DataError(
                f"{embeddings.path}: is not of the old model of {self.path}; give the map of its model, or none"
            )
        return replace(embeddings, stored=_MappedRows(embeddings.stored, self), model=self.new)


class _MappedRows:
    """Rows (N, E) of a gallery, mapped on access."""

    def __init__(self, rows: Rows, embedding_map: EmbeddingMap) -> None:
        self._rows, self._map = rows, embedding_map
        self.shape = (rows.shape[0], len(embedding_map.bias))

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self._map.apply(self._rows[rows])


def fit_map(old: Embeddings, new: Embeddings) -> EmbeddingMap:
    """Learn the map from unit embeddings of the same images by two models, float32 (N, D) and (N, E).

    Both need fingerprints.
    """
    from sklearn.linear_model import RidgeCV

    assert old.model is not None and new.model is not None, "embedded by models"
    fitted = RidgeCV(alphas=_PENALTIES).fit(old.embedding, new.embedding)
    weight_DE = np.asarray(fitted.coef_.T, np.float32)
    return EmbeddingMap(weight_DE, np.asarray(fitted.intercept_, np.float32), old.model, new.model)


def save_map(path: Path, embedding_map: EmbeddingMap) -> None:
    """Write a map as a `.npz` file, complete or not at all.

    Raises:
        DataError: the file cannot be written.
    """
    with new_file(path, DataError) as scratch, scratch.open("wb") as file:
        np.savez(file, **{name: getattr(embedding_map, name) for name in _ARRAYS})


def open_map(path: Path) -> EmbeddingMap:
    """Read a map that `save_map` wrote.

    Raises:
        DataError: the file cannot be read, is damaged, or is no map.
    """
    with damage_as_error(path, "a map of `facetrain align`"), os_errors_as(DataError, path):
        os.close(open_regular(path))  # zipfile would wait for the writer of a pipe
        arrays = [NpzArray.find(path, name) for name in _ARRAYS]
        if any(array.dtype.kind != "f" for array in arrays):
            raise ValueError("an array is not of floating-point numbers")
        require_fitting(path, sum(array.size for array in arrays))
        weight, bias, old, new = (array.read().astype(np.float32) for array in arrays)
    fits = weight.ndim == 2 and (*old.shape, *new.shape) == weight.shape and bias.shape == new.shape
    if not fits or not all(np.isfinite(array).all() for array in (weight, bias)):
        raise DataError(f"{path}: not a map of `facetrain align`: its arrays do not fit together")
    return EmbeddingMap(weight, bias, old, new, path)
