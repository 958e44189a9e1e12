"""The factor that keeps fp16 gradients from vanishing, kept on the device."""

from __future__ import annotations

import torch
from torch import Tensor


class LossScale:
    """Halved when a step overflows, doubled after `growth_interval` steps that did not.

    The numbers are those of arcface_torch (start 65536, growth every 100 steps). Nothing here waits
    for the device. With `enabled=False` the factor is 1 and stays so.
    """

    def __init__(
        self, device: torch.device, *, enabled: bool, start: float = 65536.0, growth_interval: int = 100
    ) -> None:
        self.enabled = enabled
        self._growth_interval = growth_interval
        self.value = torch.tensor(start if enabled else 1.0, device=device)
        self.streak = torch.zeros((), device=device)

    def update(self, overflowed: Tensor) -> None:
        """Take note of a step; `overflowed` is a scalar on the device, 0 or 1."""
        if not self.enabled:
            return
        streak = (self.streak + 1) * (1 - overflowed)
        grow = streak >= self._growth_interval
        # Below 1 a gradient that still overflows is not a matter of scale.
        shrunk = (self.value * 0.5).clamp_min(1.0)
        self.value = torch.where(overflowed > 0, shrunk, torch.where(grow, self.value * 2, self.value))
        self.streak = torch.where(grow, torch.zeros_like(streak), streak)

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint must hold."""
        return {"value": self.value, "streak": self.streak}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from a saved state."""
        self.value.copy_(state["value"])
        self.streak.copy_(state["streak"])
