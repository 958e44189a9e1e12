"""Builder of the check that a run learns in its first steps."""

from __future__ import annotations

import math

from facetrain.config.schema import Config
from facetrain.head.head_group import HeadPart, head_parts
from facetrain.run.parts.state import is_batch_norm_synced
from facetrain.run.parts.step_schedule import StepSchedule
from facetrain.training.learning_check import LearningCheck, RunConditions
from facetrain.training.state import TrainState

_LEAST_TRAINED = 0.01
"""A backbone counts as frozen if a smaller fraction of its weights is trained."""


def build_learning_check(config: Config, state: TrainState, schedule: StepSchedule) -> LearningCheck | None:
    """Build the check of the first steps; None for a margin that hides the nearest class, or that is not learned."""
    head, first = state.head, schedule.stages[0]
    counts_nearest = all(part.head.counts_nearest for part in head_parts(head))
    if not counts_nearest or config.trained_loss != "loss":
        return None
    weights = list(state.backbone.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    frozen = trained < _LEAST_TRAINED * sum(weight.numel() for weight in weights)
    ranks = state.world.size if is_batch_norm_synced(config) else 1
    weight_norm = None
    plain_sgd = config.optim.name == "sgd" and config.optim.muon is None
    if state.step == 0 and not config.model.init_from and plain_sgd:
        # In float64: the squares of millions of weights are added up.
        weight_norm = math.sqrt(sum(float(weight.detach().double().square().sum()) for weight in weights))
    batch = first.local_batch_size * state.world.size
    return LearningCheck(
        # Of a single head with the same chance to guess the class of an image.
        1 / sum(part.share / classes_in_step(part, batch) for part in head_parts(head)),
        start_step=state.step,
        steps_per_epoch=first.steps_per_epoch,
        total_steps=first.stop_step,
        # A frozen backbone of another run has learned already.
        where=RunConditions(
            config.optim.model_copy(update={"lr": config.optim.lr * first.lr_factor}),
            first.local_batch_size * ranks,
            is_frozen=frozen and not config.model.init_from,
            weight_norm=weight_norm,
            lr_factor=max((1.0, *config.model.lr_factors.values())),
        ),
    )


def classes_in_step(part: HeadPart, batch: int) -> float:
    """Return the expected number of classes in a step: the sampled ones, or the classes of the images."""
    count, images = part.head.num_classes, batch * part.share
    classes_of_images = count * (1 - (1 - 1 / count) ** images)  # of images that are drawn from all classes
    return max(part.head.classes_per_step, classes_of_images, 1)
