"""Exponential moving average of the weights of a backbone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from facetrain.distributed import collectives
from facetrain.optim.frozen_parts import trained_buffers


def decay_at(step: int, decay: float) -> float:
    """Return the decay of a step, counted from 0: min(decay, (1 + step) / (10 + step)).

    The average starts from the initial weights. With the full decay it would keep a share of them for thousands of
    steps (0.9999 ** 10,000 = 37 %). The warm-up of TensorFlow's `tf.train.ExponentialMovingAverage` with `num_updates`
    gives them 10 % after the first step, and reaches 0.9999 after 90,000 steps.
    """
    return min(decay, (1 + step) / (10 + step))


class WeightAverage:
    """Moving average of the trained parameters of a backbone and of its batch norm statistics.

    What is not trained has no average. Statistics differ between ranks, like the statistics of the backbone itself,
    and so do their averages.
    """

    def __init__(self, backbone: nn.Module, decay: float) -> None:
        """Start from the weights of the backbone. The decay is per step, below 1."""
        self._decay = decay
        self._parameters: dict[str, Tensor] = {
            name: value.detach() for name, value in backbone.named_parameters() if value.requires_grad
        }
        # Not the counters of batches, which are integers.
        self._buffers = {
            name: value for name, value in trained_buffers(backbone) if value.is_floating_point()
        }
        # The tensors themselves and not copies: `update` reads what the step has written.
        self._current = {**self._parameters, **self._buffers}
        self._averages = {name: value.clone() for name, value in self._current.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the averages toward the weights after a step, which is counted from 0.

        A skipped step counts: its weights equal the weights of the step before.
        """
        # One call for all tensors, instead of hundreds of small kernels.
        move = get_ema_multi_avg_fn(decay_at(step, self._decay))
        move([*self._averages.values()], [*self._current.values()], 0)

    def restart(self) -> None:
        """Set the averages to the present weights."""
        for name, value in self._current.items():
            self._averages[name].copy_(value)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Exchange weights and averages for the duration of the context, in place: CUDA graphs read these addresses."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state(self) -> dict[str, Tensor]:
        """Return the averages by the names of the backbone, with statistics averaged over the ranks. Collective."""
        averaged = {name: self._averages[name].clone() for name in self._buffers}
        collectives.mean_all_(averaged.values())
        return self._averages | averaged

    def rank_state(self) -> dict[str, Tensor]:
        """Return the averages of this rank's statistics."""
        return {name: self._averages[name] for name in self._buffers}

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        """Load what `state` or `rank_state` has returned. An average that is missing stays as it is.

        Raises:
            ValueError: an average has another shape.
        """
        for name in self._averages.keys() & saved.keys():
            if saved[name].shape != self._averages[name].shape:
                raise ValueError(f"the average of {name} has the shape {list(saved[name].shape)}")
            self._averages[name].copy_(saved[name])

    @torch.no_grad()
    def _exchange(self) -> None:
        # One tensor at a time: memory for one more copy of all weights may not be left.
        for name, value in self._current.items():
            weights = value.clone()
            value.copy_(self._averages[name])
            self._averages[name].copy_(weights)
