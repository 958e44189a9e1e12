"""Loss spikes: detection, and a report of the images of the step."""

# H losses in the history

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from facetrain.data.loading.loader import Batch
from facetrain.distributed import collectives

_HISTORY = 128
_MIN_HISTORY = 32
"""Finite losses that must be known before a loss can be called a spike."""
_MIN_DEVIATION = 0.01
"""Smallest deviation, as a fraction of the median: a loss that hardly changes must not spike by rounding."""


@dataclass(frozen=True)
class _Step:
    """Step since the last report; the tensors are on the device."""

    step: int
    epoch: int
    is_spike: Tensor
    values: dict[str, Tensor]
    images: list[tuple[Tensor, Tensor]]
    """Sample numbers and labels of each micro-batch of this rank."""


class SpikeDetector:
    """Comparison of each step's loss with the losses before it. Never synchronizes with the GPU, except in `report`.

    A spike is a loss more than `tolerance` deviations above the median of the last 128 losses. A deviation is 1.4826
    times the median absolute deviation from that median, which equals the standard deviation for normally distributed
    losses and is not affected by rare spikes (Hampel 1974, "The influence curve and its role in robust estimation",
    section 3).
    """

    def __init__(self, tolerance: float, device: torch.device) -> None:
        self._tolerance = tolerance
        self._loss_H = torch.full((_HISTORY,), float("nan"), dtype=torch.float64, device=device)
        self._recent: list[_Step] = []

    def observe(self, step: int, loss: Tensor, grad_norm: Tensor, batches: tuple[Batch, ...]) -> Tensor:
        """Add a step to the history; return 1 if its loss is a spike, else 0: a float64 scalar on the device."""
        loss, loss_H = loss.detach().double(), self._loss_H
        # Before this loss is added: a spike must not widen the deviation that it is compared with.
        median = loss_H.nanmedian()
        deviation = 1.4826 * (loss_H - median).abs().nanmedian()
        deviation = deviation.clamp_min(_MIN_DEVIATION * median.abs())
        has_history = (~loss_H.isnan()).sum() >= _MIN_HISTORY
        is_spike = has_history & loss.isfinite() & (loss > median + self._tolerance * deviation)
        # At the place of the step's number, so that a resumed run overwrites the same losses.
        loss_H[step % _HISTORY] = torch.where(loss.isfinite(), loss, float("nan"))
        values = {"loss": loss, "median": median, "deviation": deviation, "grad_norm": grad_norm}
        # Copies, because the loader reuses the memory of its batches.
        images = [(batch.sample_B.clone(), batch.label_B.clone()) for batch in batches]
        self._recent.append(_Step(step, batches[-1].epoch, is_spike, values, images))
        return is_spike.double()

    def report(self) -> list[dict[str, Any]]:
        """Return a record of each spike since the last report. Collective; waits for the device."""
        recent, self._recent = self._recent, []
        if not recent:
            return []
        # Reduced, so that all ranks list the same steps even if their losses differ in the last bit.
        is_spike = collectives.max_(torch.stack([step.is_spike for step in recent]).int().cpu())
        return [_record(step) for step, spike in zip(recent, is_spike.tolist(), strict=True) if spike]

    def state(self) -> dict[str, Tensor]:
        """Return the history of losses for a checkpoint. Spikes that are not reported yet are not part of it."""
        return {"loss": self._loss_H}

    def load_state(self, saved: dict[str, Tensor]) -> None:
        """Restore the history; do nothing if the saved run had no detector."""
        if "loss" in saved:
            self._loss_H.copy_(saved["loss"])


def _record(step: _Step) -> dict[str, Any]:
    local_images = [[samples.tolist(), labels.tolist()] for samples, labels in step.images]
    return {
        "step": step.step,
        "epoch": step.epoch,
        **{name: float(value) for name, value in step.values.items()},
        "images_and_labels_by_rank": collectives.gather_json(local_images),
    }
