"""Random numbers of augmentations: functions of seed, epoch and image, the same on any number of ranks."""

# R images that an augmentation is drawn for

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from facetrain.counter_rng import key_of, uniform

_NAMED = 100
"""Distinguishes these keys from those of `Augment` itself."""


class Draws:
    """Numbers for one augmentation. They are computed on the host, so that the host never waits for the device."""

    def __init__(self, seed: int, epoch: int, name: str, draw_R: Tensor, device: torch.device) -> None:
        # By name: a new augmentation does not change the draws of the others.
        self._parts = seed, epoch, _NAMED, zlib.crc32(name.encode())
        self._draw_R, self._device = draw_R, device

    def on_host(self, number: int) -> Tensor:
        """Return a number from 0 to 1 for each image, float64 (R,), on the host; each `number` is another draw."""
        return uniform(self._draw_R, key_of(*self._parts, number))

    def between(self, number: int, low: float, high: float) -> Tensor:
        """Return a number from `low` to `high` for each image, float32 (R,), on the device."""
        return self.to_device((low + (high - low) * self.on_host(number)).float())

    def choice(self, number: int, count: int) -> Tensor:
        """Return a whole number below `count` for each image, int64 (R,), on the host."""
        return (self.on_host(number) * count).long().clamp_(max=count - 1)

    def to_device(self, value: Tensor) -> Tensor:
        """Copy a tensor of the host to the device of the images."""
        return value.to(self._device, non_blocking=True)
