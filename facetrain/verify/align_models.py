"""Alignment of two models: a map from old to new embeddings, and what it is worth on people who were set aside."""

# N images   D embedding of the old model   E embedding of the new model

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.images.copies import different_images
from facetrain.distinct import distinct
from facetrain.embeddings.embed_images import embed_input
from facetrain.embeddings.embedding_map import EmbeddingMap, fit_map
from facetrain.embeddings.embeddings import Embeddings
from facetrain.embeddings.image_inputs import read_input
from facetrain.embeddings.inference import Inference
from facetrain.errors import DataError
from facetrain.progress import ProgressCallback
from facetrain.text import count_text
from facetrain.verify.metrics.curve_metrics import CURVE_METRICS
from facetrain.verify.metrics.roc import roc

_HELD_OUT = 0.25
"""Share of the people who are set aside."""
_LEAST_PEOPLE = 8
_MOST_COMPARED = 4000
"""Images of the set-aside people that are compared with each other, copies included: 16 million pairs."""
_METRICS = ("eer", "tar@1e-02", "tar@1e-03", "tar@1e-04")


@dataclass(frozen=True)
class Alignment:
    """Map between two models, and its quality on people who were set aside."""

    map: EmbeddingMap
    """Learned on all images."""
    images: int
    people: int
    """Number of people who were set aside, and on whose images the map was measured."""
    cosine: float
    """Mean cosine of a mapped old embedding and the new embedding of the same image."""
    accuracy: dict[str, dict[str, float | None]]
    """Metrics of `CURVE_METRICS` by gallery and probe: `old × old`, `new × new`, `old × new` and `mapped × new`."""

    def as_json(self) -> dict[str, Any]:
        """Return the measurements."""
        return {
            "images": self.images,
            "people": self.people,
            "cosine": self.cosine,
            "accuracy": self.accuracy,
        }


def align_models(
    old: Path,
    new: Path,
    images: Path,
    *,
    inference: Inference | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Alignment:
    """Embed a dataset by two models, learn the map, and measure it on people who were set aside.

    The measured map is learned on the other people; the returned one on all.

    Args:
        old: model of the gallery.
        new: model of the probes.
        images: dataset with the people's labels; its images should resemble those of the gallery.
        inference: device, batch size and precision.
        seed: seed of the draw of people.
        progress: called with the number of embedded images of a model and their total.

    Raises:
        ModelError: a model cannot be opened.
        DataError: the dataset cannot be read, has no labels or too few people.
    """
    encoded, _, label_N, _ = read_input(images)
    if (label_N < 0).any():
        raise DataError(f"{images}: has no labels; use a dataset with one subfolder per person")
    aside_N = _set_aside(label_N, seed, images)
    first, second = (embed_input(model, images, inference, progress=progress) for model in (old, new))
    learned = fit_map(_rows(first, ~aside_N), _rows(second, ~aside_N))
    chosen = np.flatnonzero(aside_N)[:_MOST_COMPARED]
    # Copies of an image would be genuine pairs of cosine 1.
    different, _ = different_images((encoded[number] for number in chosen.tolist()), label_N[chosen])
    chosen = chosen[different]
    old_ND, new_NE = first.embedding[chosen], second.embedding[chosen]
    mapped_NE, label_N = learned.apply(old_ND), label_N[chosen]
    compared = {"old × old": (old_ND, old_ND), "new × new": (new_NE, new_NE)}
    if first.size == second.size:
        compared["old × new"] = (old_ND, new_NE)
    compared["mapped × new"] = (mapped_NE, new_NE)
    return Alignment(
        fit_map(first, second),
        first.count,
        len(distinct(label_N)),
        float((mapped_NE * new_NE).sum(1).mean()),
        {name: _accuracy(*sides, label_N) for name, sides in compared.items()},
    )


def _set_aside(label_N: np.ndarray, seed: int, images: Path) -> np.ndarray:
    """Return which images belong to the people who are set aside, bool (N,)."""
    people = distinct(label_N)
    if len(people) < _LEAST_PEOPLE:
        raise DataError(
            f"{images}: has {count_text(len(people), 'person', 'people')}; a map needs at least "
            f"{_LEAST_PEOPLE}, better hundreds"
        )
    drawn = np.random.default_rng(seed).permutation(people)[: round(_HELD_OUT * len(people))]
    return np.isin(label_N, drawn)


def _rows(embeddings: Embeddings, chosen_N: np.ndarray) -> Embeddings:
    return replace(embeddings, stored=embeddings.embedding[chosen_N])


def _accuracy(gallery_ND: np.ndarray, probe_ND: np.ndarray, label_N: np.ndarray) -> dict[str, float | None]:
    """Return the metrics of all pairs of an entry and a probe, without an image and itself."""
    pair = ~np.eye(len(label_N), dtype=bool)
    if gallery_ND is probe_ND:
        # Of one model, (i, j) and (j, i) are one comparison: counted twice, a set of half the size would seem enough.
        pair = np.triu(pair)
    curve = roc((gallery_ND @ probe_ND.T)[pair], (label_N[:, None] == label_N)[pair])
    metrics = (metric for metric in CURVE_METRICS if metric.name in _METRICS)
    return {metric.name: None if curve is None else metric.of(curve) for metric in metrics}
