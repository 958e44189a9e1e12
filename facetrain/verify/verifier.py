"""Score a network on verification sets, and leave no trace in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from facetrain.data.augment import normalize
from facetrain.progress import ProgressCallback
from facetrain.verify.embedder import ImageEmbedder
from facetrain.verify.pair_set import PairSet
from facetrain.verify.result import Result
from facetrain.verify.verification import verification_result


class Verifier:
    """Embed the pairs of some sets on all ranks and score them on each, without intervals."""

    def __init__(
        self,
        sets: Iterable[PairSet],
        *,
        image_size: int,
        batch_size: int,
        device: torch.device,
        workers: int = 2,
        prepare: Callable[[Tensor], Tensor] = normalize,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Take the sets, and what their images are embedded with; what `progress` raises ends a verification."""
        self.sets = list(sets)
        self._options = {
            "image_size": image_size,
            "batch_size": batch_size,
            "device": device,
            "workers": workers,
            "prepare": prepare,
            "autocast": autocast,
            "progress": progress,
        }

    def __call__(self, model: nn.Module) -> Iterator[tuple[str, Result]]:
        """Yield the name and the result of one set after the other. Collective."""
        with evaluating(model):
            for pairs in self.sets:
                yield pairs.name, self.score(model, pairs)

    def score(self, model: Callable[[Tensor], Tensor], pairs: PairSet) -> Result:
        """Return what one set says. Collective."""
        embedder = ImageEmbedder(model, **self._options)  # type: ignore[arg-type]
        plain, mirrored = embedder.both(pairs.images, name=pairs.name)
        if not np.isfinite(plain).all():
            # A network that has diverged has no accuracy; the run that asks goes on to say why.
            return Result(
                "verification", {"accuracy": 0.0, "accuracy_std": 0.0, "pairs": float(len(pairs.same))}
            )
        return verification_result(plain, mirrored, pairs, replicates=0)[0]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode, and afterwards every part of it back as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
