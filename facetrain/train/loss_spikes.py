"""Finds the steps whose loss leaps away from those before, and keeps what is needed to see them again."""

# H losses that are remembered

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from facetrain.data.loader import Batch
from facetrain.distributed import collectives

_REMEMBERED, _ENOUGH = 128, 32
_LEAST = 0.01
"""Of the median: a loss that hardly moves does not leap by rounding."""


@dataclass(frozen=True)
class _Step:
    """A step since the last report; tensors are where they were computed."""

    number: int
    epoch: int
    is_spike: Tensor
    numbers: dict[str, Tensor]
    images: list[tuple[Tensor, Tensor]]
    """Of each micro-batch of this rank: the images' numbers, and their labels."""


class SpikeDetector:
    """Compares the loss of each step with those before; the host never waits for the device here.

    A spike lies more than `tolerance` deviations above the median of the last losses. A deviation is their
    median distance from it times 1.4826: the standard deviation, where losses are normal and spikes rare
    (Hampel 1974, "The influence curve and its role in robust estimation", section 3).
    """

    def __init__(self, tolerance: float, device: torch.device) -> None:
        self._tolerance = tolerance
        self._loss_H = torch.full((_REMEMBERED,), float("nan"), dtype=torch.float64, device=device)
        self._recent: list[_Step] = []

    def look(self, step: int, loss: Tensor, grad_norm: Tensor, batches: tuple[Batch, ...]) -> Tensor:
        """Take in a step; return 1 where its loss is a spike, else 0: a scalar on the device."""
        loss, known_H = loss.detach().double(), self._loss_H
        median = known_H.nanmedian()
        deviation = (1.4826 * (known_H - median).abs().nanmedian()).clamp_min(_LEAST * median.abs())
        is_known = (~known_H.isnan()).sum() >= _ENOUGH
        is_spike = is_known & loss.isfinite() & (loss > median + self._tolerance * deviation)
        known_H[step % _REMEMBERED] = torch.where(loss.isfinite(), loss, float("nan"))
        numbers = {"loss": loss, "median": median, "deviation": deviation, "grad_norm": grad_norm}
        # Copies: the loader fills its batches anew.
        images = [(batch.sample_B.clone(), batch.label_B.clone()) for batch in batches]
        self._recent.append(_Step(step, batches[-1].epoch, is_spike, numbers, images))
        return is_spike.double()

    def report(self) -> list[dict[str, Any]]:
        """Return what is known of each spike since the last report. Collective; waits for the device."""
        recent, self._recent = self._recent, []
        if not recent:
            return []
        # The loss is the same on all ranks; were it not to the last bit, they would still tell of the same steps.
        is_spike = collectives.max_(torch.stack([step.is_spike for step in recent]).int().cpu())
        return [_told(step) for step, spike in zip(recent, is_spike.tolist(), strict=True) if spike]

    def state(self) -> dict[str, Tensor]:
        """Return the losses that are remembered, for a checkpoint; a report comes before it."""
        return {"loss": self._loss_H}

    def load_state(self, saved: dict[str, Tensor]) -> None:
        """Go on from what `state` returned; a run that had no detector has saved nothing."""
        if "loss" in saved:
            self._loss_H.copy_(saved["loss"])


def _told(step: _Step) -> dict[str, Any]:
    mine = [[samples.tolist(), labels.tolist()] for samples, labels in step.images]
    return {
        "step": step.number,
        "epoch": step.epoch,
        **{name: float(number) for name, number in step.numbers.items()},
        "images_and_labels_by_rank": collectives.gather_json(mine),
    }
