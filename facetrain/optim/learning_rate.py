"""Learning rate schedules: functions of the step alone, so a resumed run continues them exactly."""

from __future__ import annotations

import math
from collections.abc import Callable


def polynomial_lr(
    step: float, *, base: float, warmup_steps: float, total_steps: float, power: float
) -> float:
    """Return the learning rate of a step (counted from 0): linear warm-up, then a polynomial down to 0.

    With the step t, w warm-up steps and T steps in total, the rate is base · t/w for t < w, then
    base · (1 − (t − w)/(T − w))^power, and 0 from T on. arcface_torch's published results used power 2, its present
    code uses power 1 (insightface, recognition/arcface_torch/lr_scheduler.py).
    """
    if step < warmup_steps:
        return _warm_up(step, base, warmup_steps)
    if step >= total_steps:
        return 0.0
    return base * (1 - (step - warmup_steps) / (total_steps - warmup_steps)) ** power


def cosine_lr(
    step: float, *, base: float, warmup_steps: float, total_steps: float, final_factor: float = 0.0
) -> float:
    """Return the learning rate of a step (counted from 0): linear warm-up, then half a period of a cosine.

    With the step t, w warm-up steps and T steps in total, the rate is base · t/w for t < w. From there on it is
    final + ½ (base − final) (1 + cos(π (t − w)/(T − w))) with final = base · final_factor: Loshchilov and Hutter,
    "SGDR: Stochastic Gradient Descent with Warm Restarts" (ICLR 2017), equation 5, without restarts. From T on it is
    final.
    """
    if step < warmup_steps:
        return _warm_up(step, base, warmup_steps)
    if step >= total_steps:
        return base * final_factor
    fraction = (step - warmup_steps) / (total_steps - warmup_steps)
    return base * (final_factor + (1 - final_factor) * 0.5 * (1 + math.cos(math.pi * fraction)))


def _warm_up(step: float, base: float, warmup_steps: float) -> float:
    # Step 0 uses the rate of step 1: with a rate of 0 it would change nothing.
    return base * max(step, 1) / warmup_steps


SCHEDULES: dict[str, tuple[Callable[..., float], tuple[str, ...]]] = {
    "polynomial": (polynomial_lr, ("power",)),
    "cosine": (cosine_lr, ("final_factor",)),
}
"""Registry: name in the config -> function, and the keys of the section `optim` that only some schedules take."""
