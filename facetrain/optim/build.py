"""Construction of optimizers and schedules from the settings of the section `optim`."""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor

from facetrain.errors import ConfigError
from facetrain.optim.learning_rate import SCHEDULES, Schedule
from facetrain.optim.muon import Muon, split_groups
from facetrain.optim.optimizer import FusedAdamW, FusedSGD, GroupOptimizer, ParameterGroup
from facetrain.optim.settings import OptimSettings


def build_schedule(
    optim: OptimSettings, *, warmup_steps: float, total_steps: float, steps_per_epoch: float
) -> Schedule:
    """Build the learning rate schedule that `optim.schedule` names."""
    schedule = SCHEDULES[optim.schedule]
    common = {field.name for field in fields(Schedule)}
    own = {field.name: getattr(optim, field.name) for field in fields(schedule) if field.name not in common}
    return schedule(
        base=optim.lr,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        **own,
    )


def build_optimizers(
    optim: OptimSettings, groups: list[ParameterGroup], hidden: set[Tensor]
) -> list[GroupOptimizer]:
    """Build the optimizers of parameter groups: one for all, or Muon for the `hidden` weights and one for the rest.

    Raises:
        ConfigError: no hidden weight is trained, which Muon could update.
    """
    optimizers: list[GroupOptimizer] = []
    if optim.muon:
        by_muon, groups = split_groups(groups, hidden)
        if not by_muon:
            raise ConfigError(
                "optim.muon: no weight that it could update is trained: it updates no adapters (model.lora), no frozen "
                "weights (model.freeze) and not the last layer; remove it, or set it to null"
            )
        # The schedule gives the rate of the other optimizer.
        ratio = optim.muon.lr / optim.lr
        by_muon = [group | {"lr_factor": ratio * group["lr_factor"]} for group in by_muon]
        optimizers.append(Muon(by_muon, weight_decay=optim.muon.weight_decay))
    return [*optimizers, build_optimizer(optim, groups)]


def build_optimizer(optim: OptimSettings, groups: list[ParameterGroup]) -> GroupOptimizer:
    """Build the optimizer that `optim.name` names."""
    if optim.name == "adamw":
        return FusedAdamW(groups, betas=optim.betas, weight_decay=optim.weight_decay)
    return FusedSGD(groups, momentum=optim.momentum, weight_decay=optim.weight_decay)
