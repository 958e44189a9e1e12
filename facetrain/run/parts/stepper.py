"""Construction of a run's stepper: optimizers of the backbone, and schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from facetrain.backbone.base import Backbone
from facetrain.config.schema import Config
from facetrain.errors import ConfigError
from facetrain.head.head_group import Head
from facetrain.optim.learning_rate import SCHEDULES
from facetrain.optim.loss_scale import LossScale
from facetrain.optim.muon import Muon, hidden_weights, split_groups
from facetrain.optim.optimizer import GroupOptimizer, ParameterGroup, build_optimizer, parameter_groups
from facetrain.optim.settings import OptimSettings
from facetrain.optim.stepper import Stepper
from facetrain.run.parts.step_schedule import StepSchedule
from facetrain.training.distillation import Distillation


def build_stepper(
    config: Config,
    backbone: Backbone,
    head: Head,
    scale: LossScale,
    schedule: StepSchedule,
    distillation: Distillation | None,
) -> Stepper:
    """Build what updates the weights of backbone, distillation and head at the end of a step."""
    groups = parameter_groups(backbone, config.model.lr_factors)
    projection = [] if distillation is None else list(distillation.parameters())
    if projection:
        # Outside of the backbone, so without a factor of `model.lr_factors`.
        groups.append({"params": projection, "lr_factor": 1.0})
    return Stepper(
        backbone,
        build_optimizers(config.optim, groups, hidden_weights(backbone, backbone.layer_prefixes())),
        head,
        scale,
        schedule=learning_rates(config, schedule),
        clip_grad_norm=config.optim.clip_grad_norm,
        outside_ddp=projection,
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
                "optim.muon: no weight that it could update is trained: it updates neither adapters (model.lora) nor "
                "frozen weights (model.freeze); remove it, or set it to null"
            )
        # The schedule gives the rate of the other optimizer.
        ratio = optim.muon.lr / optim.lr
        by_muon = [group | {"lr_factor": ratio * group["lr_factor"]} for group in by_muon]
        optimizers.append(Muon(by_muon, momentum=optim.muon.momentum, weight_decay=optim.muon.weight_decay))
    if groups or not optimizers:
        optimizers.append(build_optimizer(groups, optim))
    return optimizers


def learning_rates(config: Config, schedule: StepSchedule) -> Callable[[int], float]:
    """Return the function from a step to its learning rate: the schedule's, times the factor of the step's stage."""
    optim = config.optim
    scheduled, keys = SCHEDULES[optim.schedule]
    # In units of epochs: a stage with a larger batch has fewer steps on the same piece of the curve.
    rate_at = partial(
        scheduled,
        base=optim.lr,
        warmup_steps=schedule.warmup_steps,
        total_steps=schedule.progress(schedule.total_steps),
        **{key: getattr(optim, key) for key in keys},
    )
    return lambda step: schedule.stage_at(step).lr_factor * rate_at(schedule.progress(step))
