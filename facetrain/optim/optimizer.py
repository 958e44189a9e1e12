"""Optimizer of the backbone: parameter groups, and SGD or AdamW.

The classes of `torch.optim` import torch.compile's tracer as soon as one of them is built: more than a second of a core
and some 140 MiB of each process. The functions that these classes call do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

ParameterGroup = dict[str, Any]
"""Parameters with the same settings: `params`, `lr`, and `lr_factor`, by which the scheduled rate is multiplied."""


def parameter_groups(
    module: nn.Module,
    lr_factors: Mapping[str, float],
    *,
    layer_decay: float = 1.0,
    layer_prefixes: Sequence[tuple[str, ...]] = (),
) -> list[ParameterGroup]:
    """Group the trained parameters of a module by learning rate factor.

    The factor of a parameter is the product of two:

    - `lr_factors` maps prefixes of parameter names to factors. The longest prefix that matches wins; the factor is 1 if
      none does.
    - `layer_decay` ** n for a parameter with n layers behind it (layerwise decay of ELECTRA, arXiv 2003.10555; layers
      are counted as in BEiT, arXiv 2106.08254). `layer_prefixes` has the prefixes of the parameter names of each
      layer, from the input on. Parameters without a prefix belong to one more layer, the last.
    """
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            matching = [prefix for prefix in lr_factors if name.startswith(prefix)]
            factor = lr_factors[max(matching, key=len)] if matching else 1.0
            last = len(layer_prefixes)
            layer = next((n for n, layer in enumerate(layer_prefixes) if name.startswith(layer)), last)
            factor *= layer_decay ** (last - layer)
            groups.setdefault(factor, []).append(parameter)
    return [{"params": parameters, "lr_factor": factor} for factor, parameters in groups.items()]


class BackboneOptimizer:
    """Fused SGD or AdamW, which can unscale, clip and skip a step on the device.

    The steps are those of `torch.optim.SGD` and `torch.optim.AdamW` with `fused=True`, bit for bit.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        name: str,
        *,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """Take the groups of `parameter_groups`. Their learning rates are 0 until the stepper sets them.

        `name` is sgd, which uses `momentum`, or adamw, which uses `betas` and `eps`. Weight decay applies to every
        parameter, as in the published recipes.
        """
        self.param_groups: list[ParameterGroup] = [{"lr": 0.0} | group for group in groups]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {
            parameter: _initial_state(parameter, name, momentum)
            for group in groups
            for parameter in group["params"]
        }
        """Parameter -> its state, under the names of `torch.optim`."""
        self._update = self._adamw_step if name == "adamw" else self._sgd_step
        self._momentum, self._betas, self._eps = momentum, betas, eps
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, *, grad_scale: Tensor, skip: Tensor) -> None:
        """Take a step with the gradients divided by `grad_scale`, or none where `skip` is 1.

        Both are float32 scalars on the device of the parameters. The fused kernels read them there, so the host does
        not wait for the GPU. Parameters without a gradient stay as they are.
        """
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            self._update(parameters, group["lr"], grad_scale, skip)

    def zero_grad(self) -> None:
        """Discard the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _sgd_step(self, parameters: list[nn.Parameter], lr: float, grad_scale: Tensor, skip: Tensor) -> None:
        sgd(
            [*parameters],
            _gradients(parameters),
            [self.state[parameter].get("momentum_buffer") for parameter in parameters],
            fused=True,
            weight_decay=self._weight_decay,
            momentum=self._momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=skip,
        )

    def _adamw_step(
        self, parameters: list[nn.Parameter], lr: float, grad_scale: Tensor, skip: Tensor
    ) -> None:
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            [*parameters],
            _gradients(parameters),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=lr,
            weight_decay=self._weight_decay,
            eps=self._eps,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=skip,
        )


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _initial_state(parameter: Tensor, name: str, momentum: float) -> dict[str, Tensor]:
    """Return the optimizer state of one parameter before the first step.

    Set explicitly, because the fused SGD would allocate an uninitialized momentum buffer in its first step and leave
    it so if that step is skipped. Zeros give the same first step as no buffer.
    """
    if name == "adamw":
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return {"momentum_buffer": torch.zeros_like(parameter)} if momentum else {}
