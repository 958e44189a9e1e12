"""Changes that make a run fit."""

import shlex

import pytest

from facetrain.config.loading import build_config
from facetrain.plan.changes import cheapest_change
from facetrain.plan.forecast import forecast_stages
from facetrain.plan.limits import USABLE, MemoryBudget

GIB = 1 << 30


def config(**sections):
    values = {
        "data": {"train": "none", "image_size": 32},
        "model": {"backbone": "iresnet", "layers": [1] * 4, "widths": [16] * 4, "embedding_size": 32},
        "eval": {"targets": []},
    }
    return build_config(values | sections, "test")


def slightly_less_than_needed(described):
    needed = forecast_stages(described, 1000, 1).needed
    return MemoryBudget(1, int((needed.total - needed.activations // 4) / USABLE))


def test_a_change_that_contradicts_the_config_is_not_proposed():
    # Expectations need placement device, which the last change would leave.
    described = config(head={"expectations": "moving"})
    assert cheapest_change(described, 100_000_000, MemoryBudget(1, 2 * GIB)) is None


def test_checkpointed_activations_are_proposed_without_what_excludes_them():
    described = config(model={"backbone": "r18"}, train={"precision": "fp32", "fused": "on"})
    change = cheapest_change(described, 1000, slightly_less_than_needed(described))
    assert change is not None
    assert change.keys == {"model.checkpoint_activations": True, "train.fused": "off"}
    assert "without train.fused" in change.price


@pytest.mark.slow
def test_a_change_is_made_in_the_stages_that_have_the_key():
    stages = [{"until_epoch": 5, "batch_size": 512, "sample_rate": 0.5}, {"until_epoch": 9, "image_size": 24}]
    values = {
        "data": {"train": "none", "image_size": 32},
        "model": {"backbone": "mbf_small", "checkpoint_activations": True, "embedding_size": 32},
        "head": {"momentum_dtype": "bfloat16"},
        "train": {"batch_size": 128, "stages": stages},
        "eval": {"targets": []},
    }
    described = build_config(values, "test")
    budget = slightly_less_than_needed(described)
    change = cheapest_change(described, 1000, budget)
    halved = [{"until_epoch": 5, "batch_size": 256, "sample_rate": 0.5}, stages[1]]
    assert change is not None
    assert change.keys == {"optim.accumulate": 2, "train.batch_size": 64, "train.stages": halved}
    # As a shell passes them to the command.
    words = [word for word in shlex.split(change.overrides()) if word != "--set"]
    assert budget.fits(build_config(values, "test", words), 1000)
    moved = cheapest_change(described, 20_000_000, MemoryBudget(1, 3 * GIB))
    assert moved is not None
    sampled = [{"until_epoch": 5, "batch_size": 512, "sample_rate": 0.1}, stages[1]]
    assert moved.keys == {"head.placement": "host", "head.sample_rate": 0.1, "train.stages": sampled}
