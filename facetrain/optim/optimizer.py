"""Optimizers of the backbone: parameter groups, SGD and AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from facetrain.optim.parameter_names import named_plainly, require_prefixes
from facetrain.optim.settings import ADAMW_EPS

ParameterGroup = dict[str, Any]
"""Parameters with the same settings: `params`, `lr`, `lr_factor`, by which the scheduled rate is multiplied, and
`decays`, whether the weight decay applies to them."""


def parameter_groups(
    module: nn.Module, lr_factors: Mapping[str, float], *, decay_norms: bool = True
) -> list[ParameterGroup]:
    """Group the trained parameters of a module by learning rate factor and weight decay.

    Args:
        module: network.
        lr_factors: factors by prefixes of parameter names. The longest prefix that matches wins; the factor is 1 if
            none does. An adapter (LoRA) has the factor of the weight that it updates.
        decay_norms: whether the weight decay applies to the parameters of norms and to biases, too.

    Raises:
        ConfigError: no parameter's name starts with a prefix of `lr_factors`.
    """
    require_prefixes(module, lr_factors, "model.lr_factors")
    undecayed = set() if decay_norms else _norms_and_biases(module)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in named_plainly(module):
        if parameter.requires_grad:
            matching = [prefix for prefix in lr_factors if name.startswith(prefix)]
            # The longest prefix is the most specific one: `layer4.2` wins over `layer4`.
            factor = lr_factors[max(matching, key=len)] if matching else 1.0
            # Few groups: each is one call of a fused kernel over all of its tensors.
            groups.setdefault((factor, parameter not in undecayed), []).append(parameter)
    return [
        {"params": parameters, "lr_factor": factor, "decays": decays}
        for (factor, decays), parameters in groups.items()
    ]


def _norms_and_biases(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of the norms of a module, and all biases."""
    return {
        parameter
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False)
        # By the name of the class or of one it is derived from: libraries have norms of their own.
        if name == "bias" or any("Norm" in kind.__name__ for kind in type(part).mro())
    }


class GroupOptimizer:
    """Optimizer of parameters in groups, whose step unscales, clips and skips on the device.

    Not a `torch.optim.Optimizer`: to build one, torch imports its compiler, which takes a quarter of the time until the
    first step of a small run.
    """

    def __init__(self, groups: list[ParameterGroup]) -> None:
        """Take the groups; the learning rate of each is 0 until the stepper sets it."""
        self.param_groups = [{"lr": 0.0, "decays": True, **group} for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        """Moments of each parameter."""

    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        """Update all parameters that have a gradient, divided by `grad_scale`, or none where `skip` is 1.

        Both are float32 scalars on the device of the parameters. The fused kernels read them there, so the host does
        not wait for the GPU.
        """
        raise NotImplementedError

    def zero_grad(self, *, in_place: bool = False) -> None:
        """Clear the gradients: to None, after which a backward pass writes them and need not add; or to zeros."""
        for parameter in _parameters(self.param_groups):
            if in_place and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None


class FusedSGD(GroupOptimizer):
    """SGD with momentum and weight decay, by torch's fused kernel; see `torch.optim.SGD`."""

    def __init__(self, groups: list[ParameterGroup], *, momentum: float, weight_decay: float) -> None:
        """Take the groups. The buffers are zeros, which give the same first step as no buffer."""
        super().__init__(groups)
        self._momentum, self._weight_decay = momentum, weight_decay
        if momentum:
            # The fused kernel would leave its own buffer uninitialized if it skips its first step.
            self.state = {p: {"momentum_buffer": torch.zeros_like(p)} for p in _parameters(self.param_groups)}

    @torch.no_grad()
    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            # A weight that the step has not used has no gradient, and keeps its momentum.
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            buffers = [self.state[p]["momentum_buffer"] if self._momentum else None for p in trained]
            sgd(
                trained,
                [parameter.grad for parameter in trained],
                buffers,
                fused=True,
                grad_scale=grad_scale,
                found_inf=skip,
                weight_decay=self._weight_decay if group["decays"] else 0.0,
                momentum=self._momentum,
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )


class FusedAdamW(GroupOptimizer):
    """AdamW by torch's fused kernel; see `torch.optim.AdamW`."""

    def __init__(
        self,
        groups: list[ParameterGroup],
        *,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        """Take the groups; the moments are zeros."""
        super().__init__(groups)
        self._betas, self._weight_decay = betas, weight_decay
        self.state = {
            parameter: {
                # On the device: the kernel does not count a skipped step, and the host does not know of it.
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for parameter in _parameters(self.param_groups)
        }

    @torch.no_grad()
    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            first, second, steps = (
                [self.state[parameter][name] for parameter in trained]
                for name in ("exp_avg", "exp_avg_sq", "step")
            )
            adamw(
                trained,
                [parameter.grad for parameter in trained],
                first,
                second,
                [],
                steps,
                fused=True,
                grad_scale=grad_scale,
                found_inf=skip,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=group["lr"],
                weight_decay=self._weight_decay if group["decays"] else 0.0,
                eps=ADAMW_EPS,
                maximize=False,
            )


def _parameters(groups: list[ParameterGroup]) -> list[nn.Parameter]:
    return [parameter for group in groups for parameter in group["params"]]
