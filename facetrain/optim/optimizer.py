"""Optimizer of the backbone: parameter groups, and SGD or AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from facetrain.optim.parameter_names import named_plainly, require_prefixes

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
      none does. An adapter (LoRA) has the factor of the weight that it updates.
    - `layer_decay` ** n for a parameter with n layers behind it (layerwise decay of ELECTRA, arXiv 2003.10555; layers
      are counted as in BEiT, arXiv 2106.08254). `layer_prefixes` has the prefixes of the parameter names of each
      layer, from the input on. Parameters without a prefix belong to one more layer, the last.

    Raises:
        ConfigError: no parameter's name starts with a prefix of `lr_factors`.
    """
    require_prefixes(module, lr_factors, "model.lr_factors")
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in named_plainly(module):
        if parameter.requires_grad:
            matching = [prefix for prefix in lr_factors if name.startswith(prefix)]
            factor = lr_factors[max(matching, key=len)] if matching else 1.0
            last = len(layer_prefixes)
            layer = next((n for n, layer in enumerate(layer_prefixes) if name.startswith(layer)), last)
            factor *= layer_decay ** (last - layer)
            groups.setdefault(factor, []).append(parameter)
    return [{"params": parameters, "lr_factor": factor} for factor, parameters in groups.items()]


def build_optimizer(
    groups: list[ParameterGroup],
    name: str,
    *,
    momentum: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Optimizer:
    """Build a fused SGD or AdamW, which can unscale, clip and skip a step on the device (`fused_step`).

    Weight decay applies to every parameter, as in the published recipes. The learning rate of each group is 0 until
    the stepper sets it.
    """
    optimizer: Optimizer
    if name == "adamw":
        optimizer = AdamW(groups, lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
    else:
        optimizer = SGD(groups, lr=0.0, momentum=momentum, weight_decay=weight_decay, fused=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = _initial_state(parameter, name, momentum)
    return optimizer


def fused_step(optimizer: Optimizer, *, grad_scale: Tensor, skip: Tensor) -> None:
    """Take an optimizer step with the gradients divided by `grad_scale`, or none where `skip` is 1.

    Both are float32 scalars on the device of the parameters. The fused kernels read them there, so the host does not
    wait for the GPU. They are passed as `torch.amp.GradScaler` passes them to a fused optimizer.
    """
    optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    optimizer.step()


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
