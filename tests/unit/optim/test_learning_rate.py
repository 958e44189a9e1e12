import json

import pytest

from facetrain.optim.optimizer import polynomial_lr
from tests.support.shared import shared_path


def test_the_rate_warms_up_from_the_first_step_and_ends_at_zero():
    rates = [polynomial_lr(t, base=0.4, warmup_steps=4, total_steps=12, power=2) for t in range(13)]
    assert rates[:5] == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4])
    assert rates[8] == pytest.approx(0.4 * 0.5**2)
    assert rates[12] == 0
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False))


def test_a_schedule_of_nothing_but_warm_up_does_not_divide_by_zero():
    assert polynomial_lr(5, base=1.0, warmup_steps=5, total_steps=5, power=1) == 0


def test_the_rate_equals_the_peers_from_its_second_step_on():
    for case in json.loads(shared_path("golden/lr_schedule.json").read_text()):
        first = 1 if case["warmup_steps"] else 0
        for step, expected in list(enumerate(case["lr_used_at_step"]))[first:]:
            ours = polynomial_lr(
                step,
                base=case["base_lr"],
                warmup_steps=case["warmup_steps"],
                total_steps=case["total_steps"],
                power=1,
            )
            assert ours == pytest.approx(expected, rel=1e-9), f"step {step} of {case['total_steps']}"
