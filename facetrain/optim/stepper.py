"""Optimizer step that all ranks take or all ranks skip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from facetrain.distributed import collectives
from facetrain.optim.loss_scale import LossScale
from facetrain.optim.optimizer import GroupOptimizer


class RowUpdater(Protocol):
    """Head that updates its class centers itself (the rows of its weight)."""

    @property
    def update_in_backward(self) -> bool:
        """Whether the backward pass has already updated the centers."""

    def begin_step(self, step: int, *, lr: float, loss_scale: Tensor | None) -> None:
        """Set learning rate, stage and random keys of the step.

        `loss_scale` is the factor on the loss in its backward passes, None: 1.
        """

    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        """Update the centers by the accumulated gradient, divided by a scalar; discard it where `skip` is 1."""


@dataclass(frozen=True)
class StepResult:
    """Outcome of an optimizer step, as scalars on the device, so that the host does not wait for them."""

    grad_norm: Tensor
    """L2 norm of the backbone's unscaled gradient, before clipping."""
    skipped: Tensor
    """1 if the gradient was not finite on some rank, and neither the backbone nor what `RowUpdater.step` updates was
    changed; else 0."""


class Stepper:
    """Unscales and clips the gradient, lets the ranks agree that it is finite, and updates backbone and head.

    The fused optimizer kernels unscale, clip and skip: they divide by a factor and read a flag, both of which are
    scalars on the device. The host never waits for the GPU.
    """

    def __init__(
        self,
        backbone: nn.Module,
        optimizers: Sequence[GroupOptimizer],
        head: RowUpdater,
        scale: LossScale,
        *,
        schedule: Callable[[int], float],
        clip_grad_norm: float | None,
        accumulates: bool = False,
        outside_ddp: Sequence[nn.Parameter] = (),
    ) -> None:
        """Take the optimizers of the backbone's parameters, and the head, which updates its own.

        `schedule` returns the learning rate of a step. `clip_grad_norm` bounds the L2 norm of the backbone's
        gradient (None: no bound). `accumulates` says whether a step has several micro-batches: with several ranks their
        gradients then keep their memory, which are the buckets of DDP. `outside_ddp` are further parameters of the
        optimizers, whose gradients the step averages over the ranks; the bound includes them.
        """
        self.optimizers = optimizers
        self.scale = scale
        self._parameters = [*backbone.parameters(), *outside_ddp]
        self._outside_ddp = outside_ddp
        self._head = head
        self.schedule = schedule
        self._clip = clip_grad_norm
        # Not on one process: zeros in place of no gradient would move and decay a weight that a step has not used.
        self._keeps_gradients = accumulates and collectives.world_size() > 1

    def begin(self, step: int) -> float:
        """Set learning rates, stage and random keys of the step. Return the scheduled learning rate."""
        lr = self.schedule(step)
        # Set anew in each step, never multiplied: a resumed run has the same rates to the last bit.
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_factor"]
        self._head.begin_step(step, lr=lr, loss_scale=self.scale.value if self.scale.enabled else None)
        return lr

    def optimizer_states(self) -> dict[Tensor, dict[str, Tensor]]:
        """Return the state of each parameter of the optimizers; a change of it changes the optimizers."""
        return {
            parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()
        }

    def finish(self) -> StepResult:
        """Update the weights by the gradients of the backward passes, and clear the gradients. Collective."""
        # DDP has averaged the others during the backward pass.
        collectives.mean_all_(p.grad for p in self._outside_ddp if p.grad is not None)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        # Of the scaled gradients: one division of the norm replaces one of every gradient. The centers have no part in
        # it, as in arcface_torch, whose clipping concerns the backbone alone.
        norm = nn.utils.get_total_norm(gradients) / self.scale.value
        # Agree on one flag: if a single rank skipped the step, the weights of the ranks would drift apart.
        skipped = collectives.max_((~torch.isfinite(norm)).float())
        # Both factors go into the kernels as one divisor, so that the gradients are read once.
        # A divisor: a gradient below the bound is divided by 1.
        clip_factor = (norm / self._clip).clamp_min(1.0) if self._clip else torch.ones_like(norm)
        for optimizer in self.optimizers:
            optimizer.step(self.scale.value * clip_factor, skipped)
            optimizer.zero_grad(in_place=self._keeps_gradients)
        # With the same flag: backbone and centers take the same steps. Centers that the backward pass has updated have
        # asked only whether the loss and its derivatives by the target cosines are finite.
        if not self._head.update_in_backward:
            self._head.step(self.scale.value, skipped)
        # After its value was used above as the divisor of this step's gradients.
        self.scale.update(skipped)
        return StepResult(grad_norm=norm, skipped=skipped)
