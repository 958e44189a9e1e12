"""Sums of the values of each step, kept on the device until they are reported."""

from __future__ import annotations

import time

import torch
from torch import Tensor


class Meter:
    """Means of values since the last report. Never synchronizes with the GPU, except in `report` and `state`."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, int] = {}
        self._images = 0
        self._since = time.perf_counter()

    def add(self, name: str, value: Tensor | float) -> None:
        """Add a scalar; a tensor stays on its device."""
        # float64: a checkpoint saves the sum without rounding, so that a resumed run reports the same mean.
        value = value.detach().double() if isinstance(value, Tensor) else value
        self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._counts[name] = self._counts.get(name, 0) + 1

    def add_images(self, count: int) -> None:
        """Count images for `images_per_s`."""
        self._images += count

    def report(self) -> dict[str, float]:
        """Return the mean of every value, and `images_per_s`, since the last report; then start again.

        Synchronizes with the GPU.
        """
        names = list(self._sums)
        # The first copy waits for the device; the others find it idle.
        sums = [torch.as_tensor(self._sums[name], dtype=torch.float64).cpu() for name in names]
        values = {name: float(total) / self._counts[name] for name, total in zip(names, sums, strict=True)}
        now = time.perf_counter()
        values["images_per_s"] = self._images / max(now - self._since, 1e-9)
        self._sums, self._counts, self._images, self._since = {}, {}, 0, now
        return values

    def state(self) -> dict[str, Tensor]:
        """Return name -> (sum, count) as float64 tensors of shape (2,), for a checkpoint."""
        return {
            name: torch.stack(
                # With a dtype: torch would convert a Python float to float32 first.
                [torch.as_tensor(total, dtype=torch.float64).cpu(), torch.tensor(self._counts[name]).double()]
            )
            for name, total in self._sums.items()
        }

    def load_state(self, state: dict[str, Tensor], device: torch.device) -> None:
        """Continue from the sums that `state` has returned."""
        for name, (total, count) in state.items():
            self._sums[name], self._counts[name] = total.to(device), int(count)

    def restart_clock(self) -> None:
        """Exclude the time since the last report from `images_per_s`: after a verification, for example."""
        self._images, self._since = 0, time.perf_counter()
