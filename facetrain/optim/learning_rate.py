"""Learning rate schedules: functions of the step alone, so a resumed run continues them exactly.

Each class is a schedule. Its numbers beside those of `Schedule` are keys of the section `optim`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate of a step, counted from 0: linear warm-up, then `base` times the factor of the subclass."""

    base: float
    """Highest rate."""
    warmup_steps: float
    total_steps: float
    """Number of steps of the run."""
    steps_per_epoch: float

    def __call__(self, step: float) -> float:
        """Return the rate of a step, which is a fraction where an epoch has another number of steps."""
        if step < self.warmup_steps:
            # Step 0 uses the rate of step 1: with a rate of 0 it would change nothing.
            return self.base * max(step, 1) / self.warmup_steps
        return self.base * self.factor(step)

    def factor(self, step: float) -> float:
        """Return the rate of a step after the warm-up as a fraction of `base`."""
        raise NotImplementedError

    def _fraction(self, step: float) -> float:
        """Return which part of the steps after the warm-up is before a step, at most 1."""
        if step >= self.total_steps:
            return 1.0
        return (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class Polynomial(Schedule):
    """(1 − x)^power with x = (t − w)/(T − w), for the step t, w warm-up steps and T steps in total.

    arcface_torch's published results used power 2, its present code uses power 1 (insightface,
    recognition/arcface_torch/lr_scheduler.py).
    """

    power: float

    def factor(self, step: float) -> float:
        return (1 - self._fraction(step)) ** self.power


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """f + ½ (1 − f) (1 + cos(π x)) with x as in `Polynomial` and f = `final_factor`.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts" (ICLR 2017), equation 5, without
    restarts.
    """

    final_factor: float

    def factor(self, step: float) -> float:
        half_period = 0.5 * (1 + math.cos(math.pi * self._fraction(step)))
        return self.final_factor + (1 - self.final_factor) * half_period


@dataclass(frozen=True, kw_only=True)
class Steps(Schedule):
    """gamma^n after n of the milestones, which are epochs from the start of the run; the warm-up is a part of it.

    The rate of each epoch is that of `torch.optim.lr_scheduler.MultiStepLR`, stepped once an epoch, as in the code of
    AdaFace, MagFace, ElasticFace and TFace.
    """

    milestones: tuple[float, ...]
    gamma: float

    def factor(self, step: float) -> float:
        return self.gamma ** bisect_right(self.milestones, step / self.steps_per_epoch)


SCHEDULES = {"polynomial": Polynomial, "cosine": Cosine, "steps": Steps}
"""Name in the config -> schedule."""
