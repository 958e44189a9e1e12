"""The training loop, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from facetrain.data.loader import Batch
from facetrain.train.state import TrainState
from facetrain.train.step import TrainStep


class Hooks(Protocol):
    """What happens between steps. Each method is called by all ranks after the same step."""

    def log(self, state: TrainState, batches: tuple[Batch, ...]) -> None:
        """Report, where a report is due."""

    def verify(self, state: TrainState) -> None:
        """Verify, where that is due."""

    def save(self, state: TrainState) -> None:
        """Save, where that is due; see to the save in flight."""

    def stopping(self, state: TrainState) -> bool:
        """Whether the ranks have agreed to stop here."""


def fit(state: TrainState, batches: Iterable[tuple[Batch, ...]], step: TrainStep, hooks: Hooks) -> None:
    """Train until the batches end or a stop is asked for. Collective."""
    for batch in batches:  # already positioned at state.step
        step(state, batch)
        state.step += 1
        hooks.log(state, batch)
        hooks.verify(state)
        hooks.save(state)
        if hooks.stopping(state):
            return
