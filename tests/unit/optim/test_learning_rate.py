import json

import pytest
import torch

from facetrain.backbone.registry import BACKBONES
from facetrain.backbone.zoo import build_backbone
from facetrain.config.loading import build_config
from facetrain.errors import ConfigError
from facetrain.optim.learning_rate import SCHEDULES, Cosine, Polynomial
from facetrain.run.parts.step_schedule import schedule_steps
from facetrain.run.parts.stepper import learning_rates
from tests.support.golden import golden_path


def test_the_rate_warms_up_from_the_first_step_and_ends_at_zero():
    schedule = Polynomial(base=0.4, warmup_steps=4, total_steps=12, steps_per_epoch=1, power=2)
    rates = [schedule(t) for t in range(13)]
    assert rates[:5] == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4])
    assert rates[8] == pytest.approx(0.4 * 0.5**2)
    assert rates[12] == 0
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False))


def test_a_schedule_of_nothing_but_warm_up_does_not_divide_by_zero():
    assert Polynomial(base=1.0, warmup_steps=5, total_steps=5, steps_per_epoch=1, power=1)(5) == 0


def test_the_rate_equals_the_peers_from_its_second_step_on():
    for case in json.loads(golden_path("lr_schedule.json").read_text()):
        first = 1 if case["warmup_steps"] else 0
        for step, expected in list(enumerate(case["lr_used_at_step"]))[first:]:
            schedule = Polynomial(
                base=case["base_lr"],
                warmup_steps=case["warmup_steps"],
                total_steps=case["total_steps"],
                steps_per_epoch=1,
                power=1,
            )
            assert schedule(step) == pytest.approx(expected, rel=1e-9), (
                f"step {step} of {case['total_steps']}"
            )


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
    schedule = Cosine(base=0.4, warmup_steps=7, total_steps=57, steps_per_epoch=1, final_factor=final)
    ours = [schedule(step) for step in range(60)]
    assert ours[7:57] == pytest.approx(rates_of(scheduler, optimizer, 50), rel=1e-9)
    assert ours[:8] == pytest.approx([0.4 / 7, *(0.4 * step / 7 for step in range(1, 8))])
    assert ours[57:] == [0.4 * final] * 3


PUBLISHED = {
    # From the code of the authors: factor on the rate in an epoch, counted from 0.
    "AdaFace": (26, [12, 20, 24], lambda epoch: 0.1 ** sum(epoch >= drop for drop in (12, 20, 24))),
    "MagFace": (25, [10, 18, 22], lambda epoch: 0.1 ** sum(epoch >= drop for drop in (10, 18, 22))),
    "ElasticFace": (26, [7, 13, 19, 24], lambda epoch: 0.1 ** sum(m - 1 <= epoch for m in (8, 14, 20, 25))),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_steps_are_those_of_torch_and_of_published_code_in_every_step(name):
    epochs, milestones, published = PUBLISHED[name]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
    of_epochs = rates_of(scheduler, optimizer, epochs)
    values = {"schedule": "steps", "milestones": milestones, "lr": 0.1}
    config = build_config(
        {"data": {"train": "x"}, "optim": values, "train": {"epochs": epochs, "batch_size": 10}}, "x"
    )
    schedule = schedule_steps(config, 75, 1)
    rate_at = learning_rates(config, schedule)
    assert schedule.total_steps == 7 * epochs
    for step in range(schedule.total_steps):
        assert rate_at(step) == pytest.approx(of_epochs[step // 7], rel=1e-12)
        assert rate_at(step) == pytest.approx(0.1 * published(step // 7), rel=1e-12)


def test_milestones_are_epochs_with_a_warm_up_and_whatever_the_batch():
    optim = {"schedule": "steps", "milestones": [2, 3.5], "gamma": 0.5, "lr": 0.8, "warmup_epochs": 1.5}
    for batch, stages in ((10, []), (20, []), (10, [{"until_epoch": 3, "batch_size": 30}])):
        train = {"epochs": 5, "batch_size": batch, "stages": stages}
        values = {"data": {"train": "x"}, "optim": optim | {"batch_scaling": "none"}, "train": train}
        config = build_config(values, "x")
        schedule = schedule_steps(config, 120, 1)
        rate_at = learning_rates(config, schedule)
        for step in range(schedule.total_steps):
            epoch = schedule.progress(step) / schedule.steps_per_epoch
            expected = 0.8 if epoch < 2 else 0.4 if epoch < 3.5 else 0.2
            if epoch < 1.5:
                expected = 0.8 * max(epoch, 1 / schedule.steps_per_epoch) / 1.5
            assert rate_at(step) == pytest.approx(expected, rel=1e-12), (step, epoch)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_run_uses_the_schedule_that_its_config_names_with_the_keys_of_optim(name):
    keys = {"lr": 0.4, "warmup_epochs": 4, "power": 3.0, "gamma": 0.3}
    own = {"polynomial": {"power": 3.0}, "cosine": {"final_factor": 0.01}}
    own["steps"] = {"milestones": (5, 7.5), "gamma": 0.3}
    values = {"data": {"train": "x"}, "optim": keys | own[name] | {"schedule": name}}
    config = build_config(values | {"train": {"epochs": 12, "batch_size": 10}}, "x")
    rate_at = learning_rates(config, schedule_steps(config, 10, 1))
    schedule = SCHEDULES[name](base=0.4, warmup_steps=4, total_steps=12, steps_per_epoch=1, **own[name])
    assert [rate_at(step) for step in range(14)] == [schedule(step) for step in range(14)]


@pytest.mark.parametrize(
    "keys",
    [{"milestones": [3]}, *({"schedule": "steps", "milestones": epochs} for epochs in ([], [3, 2], [3, 3]))],
)
def test_milestones_that_would_have_no_effect_or_do_not_grow_are_refused(keys):
    with pytest.raises(ConfigError, match="milestones"):
        build_config({"data": {"train": "x"}, "optim": keys}, "x")


@pytest.mark.parametrize("name", [name for name in BACKBONES if name not in ("iresnet", "r2060")])
def test_the_last_layers_of_every_backbone_have_trained_parameters_and_leave_some_to_muon(name):
    with torch.device("meta"):
        network = build_backbone(name)
    trained = [key for key, value in network.named_parameters() if value.requires_grad]
    assert all(any(key.startswith(last) for key in trained) for last in network.last_layers())
    assert not all(key.startswith(network.last_layers()) for key in trained)
