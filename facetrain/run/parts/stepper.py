"""Construction of a run's stepper: optimizers of the backbone, and schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Callable

from facetrain.backbone.base import Backbone
from facetrain.config.schema import Config
from facetrain.head.head_group import Head
from facetrain.optim.build import build_optimizers, build_schedule
from facetrain.optim.loss_scale import LossScale
from facetrain.optim.muon import hidden_weights
from facetrain.optim.optimizer import parameter_groups
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
    groups = parameter_groups(backbone, config.model.lr_factors, decay_norms=config.optim.decay_norms)
    projection = [] if distillation is None else list(distillation.parameters())
    if projection:
        # Outside of the backbone, so without a factor of `model.lr_factors`.
        groups.append({"params": projection, "lr_factor": 1.0})
    return Stepper(
        backbone,
        build_optimizers(config.optim, groups, hidden_weights(backbone, backbone.last_layers())),
        head,
        scale,
        schedule=learning_rates(config, schedule),
        clip_grad_norm=config.optim.clip_grad_norm,
        accumulates=config.optim.accumulate > 1,
        outside_ddp=projection,
    )


def learning_rates(config: Config, schedule: StepSchedule) -> Callable[[int], float]:
    """Return the function from a step to its learning rate: the schedule's, times the factor of the step's stage."""
    # In units of epochs: a stage with a larger batch has fewer steps on the same piece of the curve.
    rate_at = build_schedule(
        config.optim,
        warmup_steps=schedule.warmup_steps,
        total_steps=schedule.progress(schedule.total_steps),
        steps_per_epoch=schedule.steps_per_epoch,
    )
    return lambda step: schedule.stage_at(step).lr_factor * rate_at(schedule.progress(step))
