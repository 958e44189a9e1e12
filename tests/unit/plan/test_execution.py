"""Forecast of runs that replay CUDA graphs."""

import pytest

from facetrain.config.loading import build_config
from facetrain.plan.changes import cheapest_change
from facetrain.plan.execution import replays_graphs
from facetrain.plan.forecast import forecast
from facetrain.plan.limits import USABLE, MemoryBudget

NET = {"backbone": "iresnet", "layers": [1] * 4, "widths": [16] * 4, "embedding_size": 32}


def config(*, model=NET, **train):
    return build_config({"data": {"train": "none"}, "model": model, "train": train}, "test")


@pytest.mark.parametrize(
    ("gpus", "train", "replayed"),
    [
        (8, {}, True),
        (8, {"batch_size": 256}, False),
        (8, {"batch_size": 256, "cuda_graphs": "on"}, True),
        (8, {"stages": [{"until_epoch": 1, "batch_size": 256}]}, False),
        (8, {"cuda_graphs": "off"}, False),
        (8, {"compile": "on"}, False),
        (8, {"deterministic": True}, False),
        (8, {"deterministic": True, "cuda_graphs": "on"}, True),
        (8, {"global_batch_size": 64}, False),  # batch norm over all ranks
        (1, {"global_batch_size": 64}, True),
    ],
)
def test_graphs_are_planned_where_a_run_may_use_them(gpus, train, replayed):
    assert replays_graphs(config(**train), gpus) == replayed
    assert not replays_graphs(config(model=NET | {"checkpoint_activations": True}, **train), gpus)


def test_graphs_keep_the_memory_of_a_step_beside_the_head_and_verification():
    eager, graphs = (forecast(config(cuda_graphs=mode), 100_000, 1) for mode in ("off", "on"))
    assert graphs.activations == eager.activations
    # An eager backward pass has freed its memory before the head needs its own, or the other way round.
    assert eager.work < graphs.work < 2 * eager.work
    step = eager.images + eager.activations + eager.work
    assert eager.verification == max(graphs.verification - step, 0)
    on_cpu = [forecast(config(cuda_graphs=mode), 1000, 1, cuda=False) for mode in ("off", "on")]
    assert on_cpu[0] == on_cpu[1]


def test_a_run_that_fits_without_graphs_is_told_to_leave_them_out():
    described = config(cuda_graphs="auto")
    needed = forecast(config(cuda_graphs="off"), 1000, 1).total
    budget = MemoryBudget(1, int(needed / USABLE) + 1)
    assert not budget.fits(described, 1000)
    change = cheapest_change(described, 1000, budget)
    assert change is not None and change.overrides() == "--set train.cuda_graphs=off"
    assert budget.fits(
        build_config({"data": {"train": "none"}, "model": NET}, "test", ["train.cuda_graphs=off"]), 1000
    )


def test_the_largest_batch_may_be_one_without_graphs():
    needed = forecast(config(cuda_graphs="off"), 1000, 1, batch=136).total
    budget = MemoryBudget(1, int(needed / USABLE) + 1)
    assert not budget.fits(config(), 1000) and budget.fits(config(batch_size=136), 1000)
    assert budget.largest_batch(config(), 1000) >= 136
