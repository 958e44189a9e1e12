"""Loss scale for training in fp16, kept on the device."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_HALVINGS = 24
"""Number of steps in a row that overflow until the largest factor is 1."""
_LARGEST = 2.0**MOST_HALVINGS


class LossScale:
    """Factor on the loss that keeps small fp16 gradients from becoming 0 (Micikevicius et al. 2018, section 3.2).

    Halved after a step that overflows, doubled after `growth_interval` consecutive steps that do not. The defaults
    are arcface_torch's (start 65,536; growth every 100 steps). With `enabled=False` the factor stays 1.
    Unlike `torch.amp.GradScaler`, it never synchronizes with the GPU, and all ranks skip the same steps.
    """

    def __init__(
        self, device: torch.device, *, enabled: bool, start: float = 65536.0, growth_interval: int = 100
    ) -> None:
        self.enabled = enabled
        self._growth_interval = growth_interval
        self.value = torch.tensor(start if enabled else 1.0, device=device)
        self._finite_steps = torch.zeros((), device=device)

    def update(self, overflowed: Tensor) -> None:
        """Adapt the factor after a step; `overflowed` is a scalar on the device, 0 or 1."""
        if not self.enabled:
            return
        finite_steps = (self._finite_steps + 1) * (1 - overflowed)
        grow = finite_steps >= self._growth_interval
        # Not below 1: a gradient that overflows even there is not a matter of scale.
        shrunk = (self.value * 0.5).clamp_min(1.0)
        # Nor without end: gradients that are all 0 would double it to infinity, of which no half is finite.
        grown = (self.value * 2).clamp_max(_LARGEST)
        # By `where` on the device: to branch on the flag, the host would have to wait for it.
        self.value = torch.where(overflowed > 0, shrunk, torch.where(grow, grown, self.value))
        self._finite_steps = torch.where(grow, torch.zeros_like(finite_steps), finite_steps)

    def state(self) -> dict[str, Tensor]:
        """Return the state to be saved in a checkpoint; a factor of 0 if the scale is not used."""
        value = self.value if self.enabled else torch.zeros_like(self.value)
        return {"value": value, "streak": self._finite_steps}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore the state that `state` returned, unless the run was trained, or continues, without a scale."""
        value, finite_steps = state["value"], state["streak"]
        if self.enabled and value:
            self.value.copy_(value)
            self._finite_steps.copy_(finite_steps)
