"""Which of the backbone's parameters are trained, at which rate, and by which optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from facetrain.errors import ConfigError
from facetrain.optim.fused import FusedAdamW, FusedSGD, Optimizer


def freeze(module: nn.Module, prefixes: Iterable[str]) -> None:
    """Exclude from training every parameter whose name starts with one of the prefixes.

    Raises:
        ConfigError: a prefix that no parameter's name starts with.
    """
    for prefix in prefixes:
        matched = [parameter for name, parameter in module.named_parameters() if name.startswith(prefix)]
        if not matched:
            first = ", ".join(sorted({name.split(".")[0] for name, _ in module.named_parameters()}))
            raise ConfigError(f"model.freeze: no parameter's name starts with {prefix!r}; there are {first}")
        for parameter in matched:
            parameter.requires_grad_(False)


def parameter_groups(module: nn.Module, lr_factors: Mapping[str, float]) -> list[dict[str, object]]:
    """Group the trained parameters by the factor of the longest prefix that fits; 1 where none does.

    Each group has `params`, and `lr_factor`, which the stepper multiplies the schedule's rate by.
    """
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            fitting = [prefix for prefix in lr_factors if name.startswith(prefix)]
            factor = lr_factors[max(fitting, key=len)] if fitting else 1.0
            groups.setdefault(factor, []).append(parameter)
    return [{"params": parameters, "lr_factor": factor} for factor, parameters in groups.items()]


def build_optimizer(
    groups: list[dict[str, object]],
    name: str,
    *,
    momentum: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Optimizer:
    """Build SGD with momentum, or AdamW, in the fused form that can skip a step on the device.

    Weight decay applies to every parameter, as in the published recipes.
    """
    if name == "adamw":
        return FusedAdamW(groups, betas=betas, eps=eps, weight_decay=weight_decay)
    return FusedSGD(groups, momentum=momentum, weight_decay=weight_decay)
