import json

import pytest
import torch

from facetrain.backbone.registry import BACKBONES
from facetrain.backbone.zoo import build_backbone
from facetrain.config.loading import build_config
from facetrain.optim.learning_rate import SCHEDULES, cosine_lr, polynomial_lr
from facetrain.run.parts.step_schedule import schedule_steps
from facetrain.run.parts.stepper import learning_rates
from tests.support.golden import golden_path


def test_the_rate_warms_up_from_the_first_step_and_ends_at_zero():
    rates = [polynomial_lr(t, base=0.4, warmup_steps=4, total_steps=12, power=2) for t in range(13)]
    assert rates[:5] == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4])
    assert rates[8] == pytest.approx(0.4 * 0.5**2)
    assert rates[12] == 0
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False))


def test_a_schedule_of_nothing_but_warm_up_does_not_divide_by_zero():
    assert polynomial_lr(5, base=1.0, warmup_steps=5, total_steps=5, power=1) == 0


def test_the_rate_equals_the_peers_from_its_second_step_on():
    for case in json.loads(golden_path("lr_schedule.json").read_text()):
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


def rates_of(scheduler, optimizer, steps):
    """Return the rates that a scheduler of torch gives to the steps."""
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("final", [0.0, 0.1])
def test_the_cosine_equals_that_of_torch_after_the_warm_up(final):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.4 * final)
    run = {"base": 0.4, "warmup_steps": 7, "total_steps": 57, "final_factor": final}
    ours = [cosine_lr(step, **run) for step in range(60)]
    assert ours[7:57] == pytest.approx(rates_of(scheduler, optimizer, 50), rel=1e-9)
    assert ours[:8] == pytest.approx([0.4 / 7, *(0.4 * step / 7 for step in range(1, 8))])
    assert ours[57:] == [0.4 * final] * 3


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_run_uses_the_schedule_that_its_config_names_with_the_keys_of_optim(name):
    keys = {"lr": 0.4, "warmup_epochs": 4, "power": 3.0}
    keys |= {} if name == "polynomial" else {"final_factor": 0.01}
    values = {"data": {"train": "x"}, "optim": keys | {"schedule": name}}
    config = build_config(values | {"train": {"epochs": 12, "batch_size": 10}}, "x")
    rate_at = learning_rates(config, schedule_steps(config, 10, 1))
    function, names = SCHEDULES[name]
    run = {"base": 0.4, "warmup_steps": 4, "total_steps": 12} | {key: keys[key] for key in names}
    assert [rate_at(step) for step in range(14)] == [function(step, **run) for step in range(14)]


@pytest.mark.parametrize("name", [name for name in BACKBONES if name not in ("iresnet", "r2060")])
def test_the_layers_of_every_backbone_have_trained_parameters_and_leave_some_for_the_last(name):
    with torch.device("meta"):
        network = build_backbone(name)
    layers = network.layer_prefixes()
    trained = [key for key, value in network.named_parameters() if value.requires_grad]
    assert all(any(key.startswith(layer) for key in trained) for layer in layers)
    assert not all(key.startswith(tuple(prefix for layer in layers for prefix in layer)) for key in trained)
    assert len({prefix for layer in layers for prefix in layer}) == sum(map(len, layers))
