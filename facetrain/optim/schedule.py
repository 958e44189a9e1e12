"""The learning rate as a pure function of the step."""

from __future__ import annotations


def polynomial(step: int, *, base: float, warmup_steps: int, total_steps: int, power: float) -> float:
    """Return the learning rate for a step (0-based): linear warm-up, then a polynomial down to 0.

    With t the step, w the warm-up and T the total: base · t/w below w, then
    base · (1 − (t − w)/(T − w))^power, and 0 from T on. The published recipe of arcface_torch has
    power 2, its present code power 1 (insightface, recognition/arcface_torch/lr_scheduler.py).
    """
    if step < warmup_steps:
        # Step 0 takes step 1's rate: at rate 0 it would be a step for nothing.
        return base * max(step, 1) / warmup_steps
    if step >= total_steps:
        return 0.0
    return base * (1 - (step - warmup_steps) / (total_steps - warmup_steps)) ** power
