"""SGD and AdamW in one kernel, which unscales, clips and skips by numbers on the device.

These are the kernels of torch.optim with `fused=True`. Its classes import the tracer of torch.compile as soon as
one is made, over a second of a run's start that a network which is not compiled has no use for.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Optimizer(Protocol):
    """What the stepper needs of an optimizer."""

    param_groups: list[dict[str, Any]]
    """Each has `params`, `lr`, and whatever else its maker gave it."""
    state: dict[Tensor, dict[str, Tensor]]
    """What is kept of each parameter, to be saved with it."""

    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        """Step by the gradients divided by a scalar; where the scalar `skip` is 1, change nothing."""


class FusedSGD:
    """SGD with momentum and decay, for float32 parameters on one device."""

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, weight_decay: float) -> None:
        self.param_groups = [group | {"lr": 0.0} for group in groups]
        # Zeros give the same first step as no buffer does, whether or not that step is skipped.
        self.state = {
            parameter: {"momentum_buffer": torch.zeros_like(parameter)} if momentum else {}
            for parameter in _parameters(groups)
        }
        self._momentum, self._decay = momentum, weight_decay

    @torch.no_grad()
    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        """Step by the gradients divided by a scalar; where the scalar `skip` is 1, change nothing."""
        for group in self.param_groups:
            if parameters := _with_gradient(group):
                torch._fused_sgd_(
                    parameters,
                    _gradients(parameters),
                    [self.state[p]["momentum_buffer"] for p in parameters] if self._momentum else [],
                    weight_decay=self._decay,
                    momentum=self._momentum,
                    lr=group["lr"],
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    is_first_step=False,
                    grad_scale=grad_scale,
                    found_inf=skip,
                )


class FusedAdamW:
    """Adam with decoupled decay (Loshchilov and Hutter 2019, algorithm 2), for float32 parameters on one device."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self.param_groups = [group | {"lr": 0.0} for group in groups]
        self.state = {
            parameter: {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for parameter in _parameters(groups)
        }
        self._betas, self._eps, self._decay = betas, eps, weight_decay

    @torch.no_grad()
    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        """Step by the gradients divided by a scalar; where the scalar `skip` is 1, change nothing."""
        for group in self.param_groups:
            if not (parameters := _with_gradient(group)):
                continue
            kept = [self.state[parameter] for parameter in parameters]
            steps = [each["step"] for each in kept]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                parameters,
                _gradients(parameters),
                [each["exp_avg"] for each in kept],
                [each["exp_avg_sq"] for each in kept],
                [],
                steps,
                lr=group["lr"],
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=self._decay,
                eps=self._eps,
                amsgrad=False,
                maximize=False,
                grad_scale=grad_scale,
                found_inf=skip,
            )
            torch._foreach_sub_(steps, [skip] * len(steps))  # a step that was skipped counts for nothing


def _parameters(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def _with_gradient(group: dict[str, Any]) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
