"""Learning rate schedules: functions of the step alone, so a resumed run continues them exactly."""

from __future__ import annotations

import itertools
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


def one_cycle_lr(
    step: float,
    *,
    base: float,
    warmup_steps: float,
    total_steps: float,
    start_factor: float = 0.04,
    final_factor: float = 0.0,
) -> float:
    """Return the learning rate of a step (counted from 0): one triangle, and a descent after it.

    With the step t, w warm-up steps and T ≥ 2w steps in total, the rate is linear between these points, and constant
    from T on:

        t = 0: base · start_factor     t = w: base     t = 2w: base · start_factor     t = T: base · final_factor

    Smith and Topin, "Super-Convergence" (arXiv 1708.07120), section 3: one cycle a little shorter than the run, and
    for the rest of it a rate several orders of magnitude below the first. The momentum stays constant here.
    """
    points = [
        (0.0, start_factor),
        (warmup_steps, 1.0),
        (2 * warmup_steps, start_factor),
        (total_steps, final_factor),
    ]
    # Without a last descent (T = 2w) the last piece is empty, and no step falls into it.
    for (start, low), (stop, high) in itertools.pairwise(points):
        if step < stop:
            return base * (low + (high - low) * (step - start) / (stop - start))
    return base * final_factor


def _warm_up(step: float, base: float, warmup_steps: float) -> float:
    # Step 0 uses the rate of step 1: with a rate of 0 it would change nothing.
    return base * max(step, 1) / warmup_steps


SCHEDULES: dict[str, tuple[Callable[..., float], tuple[str, ...]]] = {
    "polynomial": (polynomial_lr, ("power",)),
    "cosine": (cosine_lr, ("final_factor",)),
    "one_cycle": (one_cycle_lr, ("start_factor", "final_factor")),
}
"""Registry: name in the config -> function, and the keys of the section `optim` that only some schedules take."""
