"""Check in the first thousand steps that training learns: its top-1 share against chance."""

from __future__ import annotations

import math
from dataclasses import dataclass

from facetrain.optim.settings import OptimSettings
from facetrain.text import percent

_FIRST_STEPS = 1000
"""Steps after which the check decides at the latest."""
_FEWEST_STEPS = 100
"""Steps that the check needs: a warm-up alone can take so long."""
_DEVIATIONS = 4
"""Standard deviations by which the number of nearest target classes must exceed its expectation under chance."""
_LEAST_MOVEMENT = 0.05
"""Fraction of its norm that a backbone with random weights moves at least, if the head does not learn alone."""


@dataclass(frozen=True)
class RunConditions:
    """Settings of a run that can be the reason why it does not learn."""

    optim: OptimSettings
    """Optimizer, with the learning rate of the first stage."""
    normalized_images: int
    """Images over which a batch norm averages in a training step."""
    is_frozen: bool
    """Whether almost no weight of an untrained backbone is trained."""
    weight_norm: float | None
    """Norm of all weights of the backbone at the start. None: do not check how far they have moved, because the run
    was resumed, has the weights of another run, or has no SGD."""
    lr_factor: float = 1.0
    """Largest factor on the rate of a weight of the backbone (`model.lr_factors`)."""


class LearningCheck:
    """Comparison of the first steps with chance. All ranks pass the same numbers.

    The top-1 share counts the images whose target class is the nearest of the classes of the step, without the
    margin. It comes from numbers that the loss has computed anyway. The reports of the second half of the first steps
    count; a run that is resumed among them is not checked, because a part of them says nothing.

    The first steps end with the first epoch: until then every image is new. Later a network can also memorize images
    with random labels, and be far better than chance. Datasets with fewer than 100 steps per epoch are checked
    nevertheless, but there such labels may go unnoticed.
    """

    def __init__(
        self,
        num_classes: float,
        *,
        start_step: int,
        steps_per_epoch: int,
        total_steps: int,
        where: RunConditions,
    ) -> None:
        """Take the number of classes in a step, and the step from which training starts."""
        self._num_classes, self._where = num_classes, where
        self._last_step = min(_FIRST_STEPS, total_steps, max(steps_per_epoch, _FEWEST_STEPS))
        self.is_finished = total_steps < _FEWEST_STEPS or 2 * start_step > self._last_step
        """Whether the check has decided, so that later reports need not be passed."""
        self._losses: list[float] = []
        self._nearest = self._images = 0
        self._last_report = start_step
        self._path = 0.0

    def observe(self, step: int, values: dict[str, float], nearest: int, images: int) -> str | None:
        """Take a report: means of `loss`, `lr` and `grad_norm`, and how many images had the nearest target class.

        Return the message if this report ends the check and the run does not learn.
        """
        if self.is_finished:
            return None
        # Length of SGD's path, an upper bound: momentum adds up at most 1 / (1 − momentum) of each gradient.
        # In this order: the mean with a step that was not finite can be NaN, of which `min` takes the first argument.
        norm = min(self._where.optim.clip_grad_norm or math.inf, values["grad_norm"])
        lr = values["lr"] * self._where.lr_factor
        self._path += (step - self._last_report) * lr * norm / (1 - self._where.optim.momentum)
        self._last_report = step
        # In the first half, a run with a warm-up is still near chance.
        if 2 * step <= self._last_step:
            return None
        self.is_finished = step >= self._last_step
        if step <= self._last_step or not self._losses:
            self._losses.append(values["loss"])
            self._nearest += nearest
            self._images += images
        return self._verdict(step) if self.is_finished else None

    def _verdict(self, step: int) -> str | None:
        if not self._images:
            return None
        expected = self._images / self._num_classes
        # The number is nearly Poisson: its deviation is the square root of its expectation. 1 is added for expectations
        # near 0.
        is_above_chance = self._nearest > expected + _DEVIATIONS * (math.sqrt(expected) + 1)
        if is_above_chance and not self._where.is_frozen and not self._hardly_moves:
            return None
        loss, top_1 = sum(self._losses) / len(self._losses), self._nearest / self._images
        return (
            f"training does not seem to learn: after {step:,} steps the loss is {loss:.4g}, and the target class is "
            f"the nearest for {percent(top_1)} of the images (chance: {percent(1 / self._num_classes)}); likely "
            "causes, in this order: "
            + "; ".join(f"{number}. {cause}" for number, cause in enumerate(self._causes(), start=1))
        )

    @property
    def _hardly_moves(self) -> bool:
        weight_norm = self._where.weight_norm
        return weight_norm is not None and self._path < _LEAST_MOVEMENT * weight_norm

    def _causes(self) -> list[str]:
        where = self._where
        fault = (
            f"too low: the weights of the backbone have moved by less than {_LEAST_MOVEMENT:.0%}"
            if self._hardly_moves
            else "too low or too high (published: 0.1 per 1,024 images for SGD, 0.001 for AdamW)"
        )
        frozen = "model.freeze excludes almost all weights of the backbone, which has random weights"
        images = where.normalized_images
        norm = f"batch norm averages over {images:,} images (a larger batch, or model.batch_norm: sync)"
        return [
            *([frozen] if where.is_frozen else []),
            *([norm] if images <= 4 else []),
            f"optim.lr {where.optim.lr:g} is {fault}",
            "the labels do not belong to the images (`facetrain data check`)",
            "the images are empty or not normalized (`facetrain data inspect`)",
            *([] if images <= 4 else [norm]),
        ]
