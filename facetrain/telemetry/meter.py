"""Sums of what happened since the last report, kept on the device until somebody asks."""

from __future__ import annotations

import time

import torch
from torch import Tensor


class Meter:
    """Collect values at every step without waiting for the device; average them on request."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, int] = {}
        self._images = 0
        self._since = time.perf_counter()

    def add(self, name: str, value: Tensor | float) -> None:
        """Take in a scalar; a tensor stays on its device."""
        # float64, so that a sum is the same whether or not it went through a checkpoint.
        value = value.detach().double() if isinstance(value, Tensor) else value
        self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._counts[name] = self._counts.get(name, 0) + 1

    def add_images(self, count: int) -> None:
        """Count images for the rate."""
        self._images += count

    def report(self) -> dict[str, float]:
        """Return the mean of every value and `images_per_s` since the last report, and start anew.

        This is where the host waits for the device.
        """
        names = list(self._sums)
        sums = [torch.as_tensor(self._sums[name], dtype=torch.float64).cpu() for name in names]
        values = {name: float(total) / self._counts[name] for name, total in zip(names, sums, strict=True)}
        now = time.perf_counter()
        values["images_per_s"] = self._images / max(now - self._since, 1e-9)
        self._sums, self._counts, self._images, self._since = {}, {}, 0, now
        return values

    def state(self) -> dict[str, Tensor]:
        """Return the sums so far, for a checkpoint: the next report after a resume has them in it."""
        return {
            name: torch.stack(
                # Its dtype said at once: a number of Python's would pass through float32.
                [torch.as_tensor(total, dtype=torch.float64).cpu(), torch.tensor(self._counts[name]).double()]
            )
            for name, total in self._sums.items()
        }

    def load_state(self, state: dict[str, Tensor], device: torch.device) -> None:
        """Go on from saved sums."""
        for name, (total, count) in state.items():
            self._sums[name], self._counts[name] = total.to(device), int(count)

    def restart_clock(self) -> None:
        """Leave out of the rate what has passed since the last report: a verification, say."""
        self._images, self._since = 0, time.perf_counter()
