"""Verification of a network during training, on sets of image pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor, nn

from facetrain.backbone.base import evaluation_mode
from facetrain.distributed import collectives
from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.models.inference_network import inference_network
from facetrain.verify.metrics.draws import Draws
from facetrain.verify.metrics.result import Result
from facetrain.verify.pair_protocol import verification_result
from facetrain.verify.set_faults import warn_of_faulty_set
from facetrain.verify.sets.pair_set import PairSet


class Verifier:
    """Verification sets with the settings for embedding them; scores one network after the other.

    All ranks embed, and only the leader computes the metrics. There are no bootstrap intervals, which would
    lengthen the pause in training.
    """

    def __init__(
        self,
        sets: Iterable[PairSet],
        embedder: Callable[[Callable[..., Tensor]], ImageEmbedder],
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Store the sets, what returns the embedder of a network, and what shows the progress.

        `progress` is called with the name of a set, the number of its embedded images and their total.

        The embedder's `check_stop` is called after each batch; an exception that it raises ends the verification.

        The leader warns of faults of the sets.
        """
        self.sets = list(sets)
        if not collectives.rank():
            for pairs in self.sets:
                warn_of_faulty_set(pairs)
        self._embedder, self._progress = embedder, progress

    def __call__(self, model: nn.Module) -> Iterator[tuple[str, Result]]:
        """Yield the name and the result of each set on the leader, and nothing on the other ranks. Collective."""
        with evaluation_mode(model):
            embedder = self._embedder(model)
            # As `facetrain eval` does, so that both report the same numbers.
            embedder = replace(embedder, network=inference_network(model, embedder.device))
            for pairs in self.sets:
                if (result := self.score(embedder, pairs)) is not None:
                    yield pairs.name, result

    def score(self, embedder: ImageEmbedder, pairs: PairSet) -> Result | None:
        """Return the result of one set on the leader, and None on the other ranks. Collective.

        Embeddings that are not finite give accuracy 0 instead of an error: the training loop stops a run
        that has diverged, with a message about the step.
        """
        if self._progress:
            embedder = replace(embedder, progress=partial(self._progress, pairs.name))
        plain, mirrored = embedder.embed_plain_and_mirrored(
            pairs.images, name=pairs.name, landmarks=pairs.landmarks
        )
        if collectives.rank():
            return None
        if not (np.isfinite(plain).all() and np.isfinite(mirrored).all()):
            return Result(
                "verification", {"accuracy": 0.0, "accuracy_std": 0.0, "pairs": float(len(pairs.same))}
            )
        return verification_result(plain, mirrored, pairs, draws=Draws(0))
