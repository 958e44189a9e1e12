"""Sums of the values of each step, kept on the device until they are reported."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor


class Meter:
    """Means of values since the last report. Waits for the GPU only in the functions of `take`, and in `state`."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, int] = {}
        self._images = 0
        self._since = time.perf_counter()

    def add(self, name: str, value: Tensor | float) -> None:
        """Add a scalar; a tensor stays on its device."""
        value = value.detach() if isinstance(value, Tensor) else value
        if name in self._sums:
            self._sums[name] = self._sums[name] + value
        else:
            # float64: a checkpoint saves the sum without rounding, so that a resumed run reports the same mean.
            self._sums[name] = value.double() if isinstance(value, Tensor) else value
        self._counts[name] = self._counts.get(name, 0) + 1

    def add_images(self, count: int) -> None:
        """Count images for `images_per_s`."""
        self._images += count

    def take(self) -> Callable[[], dict[str, float]]:
        """Start again; return the function that returns the mean of every value, and `images_per_s`.

        The sums are on their way to the host. The function waits for them, and not for what a GPU has to do since.
        """
        sums, counts, images = self._sums, self._counts, self._images
        self._sums, self._counts, self._images = {}, {}, 0
        arrived = _to_host({name: total for name, total in sums.items() if isinstance(total, Tensor)})

        def means() -> dict[str, float]:
            totals = {**sums, **arrived()}
            now = time.perf_counter()
            values = {name: float(total) / counts[name] for name, total in totals.items()}
            values["images_per_s"] = images / max(now - self._since, 1e-9)
            self._since = now
            return values

        return means

    def report(self) -> dict[str, float]:
        """Return the mean of every value, and `images_per_s`, since the last report; then start again.

        Synchronizes with the GPU.
        """
        return self.take()()

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

    def exclude(self, seconds: float) -> None:
        """Exclude a part of the time since the last report from `images_per_s`."""
        self._since += seconds


def _to_host(scalars: dict[str, Tensor]) -> Callable[[], dict[str, float]]:
    """Begin to copy scalars of one device to the host; return the function that waits for them and returns them."""
    if not scalars:
        return dict
    # In one copy. torch allocates page-locked memory for its result.
    copied = torch.stack(list(scalars.values())).to("cpu", non_blocking=True)
    event = None
    if next(iter(scalars.values())).is_cuda:
        event = torch.cuda.Event()
        event.record()

    def arrived() -> dict[str, float]:
        if event is not None:
            event.synchronize()
        return dict(zip(scalars, copied.tolist(), strict=True))

    return arrived
