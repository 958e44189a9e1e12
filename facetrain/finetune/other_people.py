"""Harm of a fine-tuning to people whom it does not train on: drift of embeddings, accuracy of their pairs."""

# N images   D embedding

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.synthetic.drawing import draw_jpeg
from facetrain.distributed.world import join
from facetrain.embeddings.embed_images import embed_images, open_embedder
from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.embeddings.inference import Inference
from facetrain.models.embedding_model import open_model
from facetrain.text import percent
from facetrain.verify.evaluate import evaluate
from facetrain.verify.metrics.result import Result
from facetrain.verify.protocol_options import EvaluationOptions
from facetrain.verify.protocols import evaluate_set

_DRAWN = 200
"""Drawn faces, each of another person. What a model forgets shows on them as on photos of strangers: they move as LFW's
faces do, see docs/log/log.md. They are sharp whatever the photos are: weights that learn small faces forget large ones,
which the people set aside, with small faces too, do not show."""
LEAST_COSINE = 0.97
"""Mean cosine between the embeddings of drawn faces before and after, below which the accuracy on LFW falls."""
_MOST_LOST = 0.002
"""Accuracy that may be lost on a set of other people; one pair always may, which shows nothing in a small set."""


_OPTIONS = EvaluationOptions(bootstrap=0)
"""Of a set only the accuracy counts."""


@dataclass(frozen=True)
class Harm:
    """Changes for other people by one model."""

    cosine: float
    """Mean cosine between this model's and the first model's embeddings of drawn faces."""
    before: dict[str, Result]
    """Results of the first model on pairs of other people, by the name of the set."""
    after: dict[str, Result]
    """Results of this model."""

    def reasons(self) -> Iterator[str]:
        """Yield why other people suffer; nothing if they do not."""
        if self.cosine < LEAST_COSINE:
            yield (
                f"embeddings of strangers move to a mean cosine of {self.cosine:.3f}, of which at least {LEAST_COSINE} "
                "has to remain"
            )
        for name, result in self.after.items():
            before, after = accuracy_of(self.before[name]), accuracy_of(result)
            # A little more than one pair: the folds weigh their pairs slightly differently.
            if before - after > max(_MOST_LOST, 1.1 / (result.metrics["pairs"] or 1)):
                yield f"the accuracy on {name} falls from {percent(before)} to {percent(after)}"


class OtherPeople:
    """The first model's embeddings and results of people whom the fine-tuning does not train on."""

    def __init__(self, first: Path, targets: Sequence[str], inference: Inference) -> None:
        """Measure the first model, and warn of faults of the sets.

        Args:
            first: its path.
            targets: verification sets of other people.
            inference: device, batch size and precision.

        Raises:
            ModelError: the model cannot be opened, or an embedding is not finite.
            DataError: a set cannot be read.
        """
        self._inference = inference
        evaluated = evaluate(first, targets, Path(), options=_OPTIONS, inference=inference)
        self._sets, self._results = evaluated.sets.values(), evaluated.results
        with self._embedder_of(first) as embedder:
            # A fine-tuned model takes images of the same size.
            self._drawn = [draw_jpeg(0, person, 0, embedder.image_size) for person in range(_DRAWN)]
            self._drawn_ND = self._embed_drawn(embedder)

    def harm_of(self, model: Path) -> Harm:
        """Measure a fine-tuned model.

        Raises:
            ModelError: it cannot be opened, or an embedding is not finite.
        """
        results: dict[str, Result] = {}
        with self._embedder_of(model) as embedder:
            cosine = float((self._embed_drawn(embedder) * self._drawn_ND).sum(1).mean())
            for target in self._sets:
                results |= evaluate_set(target, embedder, _OPTIONS)
        return Harm(cosine, self._results, results)

    @contextmanager
    def _embedder_of(self, model: Path) -> Iterator[ImageEmbedder]:
        with join(self._inference.device) as world:
            yield open_embedder(open_model(model, world.device), world, self._inference)

    def _embed_drawn(self, embedder: ImageEmbedder) -> np.ndarray:
        """Return unit embeddings (N, D) of drawn faces."""
        return embed_images(embedder, self._drawn, "drawn faces")[0]


def accuracy_of(result: Result) -> float:
    """Return the accuracy of a set of pairs."""
    return result.metrics["accuracy"] or 0.0
