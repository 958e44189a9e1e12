"""Harm of a fine-tuning to people whom it does not train on: drift of embeddings, accuracy of their pairs."""

# N images   D embedding

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.synthetic.drawing import draw_jpeg
from facetrain.distributed.world import join
from facetrain.embeddings.embed_images import embed_images, open_embedder
from facetrain.embeddings.inference import Inference
from facetrain.models.embedding_model import open_model
from facetrain.verify.evaluate import evaluate
from facetrain.verify.metrics.result import Result
from facetrain.verify.model_results import ModelResults

_DRAWN = 200
"""Drawn faces, each of another person. What a model forgets shows on them as on photos of strangers: they move as LFW's
faces do, see docs/log/log.md. They are sharp whatever the photos are: weights that learn small faces forget large ones,
which the people set aside, with small faces too, do not show."""
LEAST_COSINE = 0.97
"""Mean cosine between the embeddings of drawn faces before and after, below which the accuracy on LFW falls."""
_MOST_LOST = 0.002
"""Accuracy that may be lost on a set of other people; one pair always may, which shows nothing in a small set."""


@dataclass(frozen=True)
class Harm:
    """Changes for other people by one model."""

    cosine: float
    """Mean cosine between this model's and the first model's embeddings of drawn faces."""
    compared: ModelResults
    """Results on pairs of other people, beside those of the first model."""

    def reasons(self) -> Iterator[str]:
        """Yield why other people suffer; nothing if they do not."""
        if self.cosine < LEAST_COSINE:
            yield (
                f"embeddings of strangers move to a mean cosine of {self.cosine:.3f}, of which at least {LEAST_COSINE} "
                "has to remain"
            )
        for name, result in self.compared.results.items():
            before, after = accuracy_of(self.compared.other_results[name]), accuracy_of(result)
            # A little more than one pair: the folds weigh their pairs slightly differently.
            if before - after > max(_MOST_LOST, 1.1 / (result.metrics["pairs"] or 1)):
                yield f"the accuracy on {name} falls from {before:.2%} to {after:.2%}"


class OtherPeople:
    """The first model's embeddings and results of people whom the fine-tuning does not train on."""

    def __init__(self, first: Path, targets: Sequence[str], inference: Inference) -> None:
        """Measure the first model.

        Args:
            first: its path.
            targets: verification sets of other people.
            inference: device, batch size and precision.

        Raises:
            ModelError: the model cannot be opened, or an embedding is not finite.
            DataError: a set cannot be read.
        """
        self._targets, self._inference = list(targets), inference
        self._drawn: list[bytes] = []
        self._drawn_ND, self._results = self._embed_drawn(first), self._evaluate(first)

    def harm_of(self, model: Path) -> Harm:
        """Measure a fine-tuned model.

        Raises:
            ModelError: it cannot be opened, or an embedding is not finite.
        """
        cosine = float((self._embed_drawn(model) * self._drawn_ND).sum(1).mean())
        return Harm(cosine, self._evaluate(model).compared_with("the first model", self._results.results))

    def _evaluate(self, model: Path) -> ModelResults:
        return evaluate(model, self._targets, Path(), inference=self._inference)

    def _embed_drawn(self, model: Path) -> np.ndarray:
        """Return unit embeddings (N, D) of drawn faces."""
        with join(self._inference.device) as world:
            opened = open_model(model, world.device)
            if not self._drawn:  # a fine-tuned model takes images of the same size
                self._drawn = [draw_jpeg(0, person, 0, opened.image_size) for person in range(_DRAWN)]
            return embed_images(open_embedder(opened, world, self._inference), self._drawn, "drawn faces")[0]


def accuracy_of(result: Result) -> float:
    """Return the accuracy of a set of pairs."""
    return result.metrics["accuracy"] or 0.0
