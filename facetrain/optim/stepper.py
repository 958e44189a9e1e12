"""One optimizer step that all ranks take, or all skip."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from facetrain.distributed import collectives
from facetrain.optim.fused import Optimizer
from facetrain.optim.scaler import LossScale


class RowUpdater(Protocol):
    """What the stepper needs of a head, which updates its own class centers."""

    lr: float

    @property
    def update_in_backward(self) -> bool:
        """Whether the backward pass has already updated the centers."""

    def begin_step(self, step: int) -> None:
        """Choose the step's sample."""

    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        """Update the centers by what was accumulated, divided by a scalar; where the scalar `skip` is 1, forget it."""


@dataclass(frozen=True)
class Stepped:
    """What came of a step; scalars on the device, so that nobody has to wait for them."""

    grad_norm: Tensor
    """L2 norm of the backbone's unscaled gradient, before clipping."""
    skipped: Tensor
    """1 where the gradient was not finite and nothing was changed, else 0."""


class Stepper:
    """Unscale, clip, agree that everything is finite, and step backbone and head.

    Unscaling, clipping and skipping all happen inside the fused optimizer's own kernel: it divides
    by a factor and reads a flag, both on the device, so the host never waits.
    """

    def __init__(
        self,
        backbone: nn.Module,
        optimizer: Optimizer,
        head: RowUpdater,
        scale: LossScale,
        *,
        schedule: Callable[[int], float],
        clip_grad_norm: float | None,
    ) -> None:
        self.optimizer = optimizer
        self.scale = scale
        self._parameters = [p for p in backbone.parameters() if p.requires_grad]
        self._head = head
        self._schedule = schedule
        self._clip = clip_grad_norm

    def begin(self, step: int) -> float:
        """Set every learning rate for a step, and return the schedule's."""
        lr = self._schedule(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        self._head.lr = lr
        self._head.begin_step(step)
        return lr

    def finish(self) -> Stepped:
        """Step by the gradients that the backward passes left, and clear them. Collective."""
        norm = _total_norm(p.grad for p in self._parameters if p.grad is not None) / self.scale.value
        skipped = collectives.max_((~torch.isfinite(norm)).float())
        self._step_backbone(norm, skipped)
        if not self._head.update_in_backward:
            self._head.step(self.scale.value, skipped)
        self.scale.update(skipped)
        return Stepped(grad_norm=norm, skipped=skipped)

    def _step_backbone(self, norm: Tensor, skipped: Tensor) -> None:
        shrink = (norm / self._clip).clamp_min(1.0) if self._clip else torch.ones_like(norm)
        self.optimizer.step(grad_scale=self.scale.value * shrink, skip=skipped)
        for parameter in self._parameters:
            parameter.grad = None


def _total_norm(gradients: Iterable[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(list(gradients))).float().norm()
