"""Training batches of a run in stages: a loader for each stage, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from facetrain.data.loading.loader import Batch, Loader


class StagedLoader:
    """Loaders of consecutive stages, with the interface of one `Loader`.

    The loader of a stage opens when the one before has ended: two would need twice the memory and twice as many reading
    processes.
    """

    def __init__(self, open_stages: Sequence[Callable[[set[str]], Loader]]) -> None:
        """Take what opens the loader of each stage; the first one begins to read at once.

        Each gets the set of messages about bad images, to which it adds its own.
        """
        self.skipped: set[str] = set()
        """Messages about the bad images that were replaced so far."""
        self._wait_s = 0.0
        self._remaining = list(open_stages)
        self._open_next()

    @property
    def wait_s(self) -> float:
        """Seconds that training has waited for batches."""
        return self._wait_s + self._loader.wait_s

    @property
    def steps_ahead(self) -> int:
        """Steps of the present stage that are read ahead of the next one."""
        return self._loader.steps_ahead

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        """Yield the micro-batches of one step after the other, of all stages."""
        yield from self._loader
        while self._remaining:
            self.close()
            self._wait_s += self._loader.wait_s
            self._open_next()
            yield from self._loader

    def close(self) -> None:
        """Close the loader of the present stage; can be called twice."""
        self._loader.close()

    def _open_next(self) -> None:
        self._loader = self._remaining.pop(0)(self.skipped)
