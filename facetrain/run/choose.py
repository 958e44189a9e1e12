"""Measurements before a run is resolved for good, `--batch auto` and `--lr find`: they change the request."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

from facetrain.config.loading import is_set
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.distributed.world import World
from facetrain.run.agree import Agreed
from facetrain.run.build import build_network
from facetrain.run.lr_range_test import RangeTest, run_range_test
from facetrain.run.parts.loader import build_augment, build_loader
from facetrain.run.request import TrainRequest
from facetrain.training.step import TrainStep

FitBatch = Callable[[Config, World, FaceDataset, bool], tuple[Mapping[str, Any], str]]
"""Returns the config keys of the batch that fits and their values, and a line that says why; the last argument says
whether the learning rate stays. Collective."""


def with_fitting_batch(
    request: TrainRequest, agreed: Agreed, world: World, fit_batch: FitBatch
) -> TrainRequest:
    """Return the request with the batch that fits into the memory of the machine. Collective.

    Raises:
        ConfigError: no batch fits, or the stages of the run have batch sizes.
    """
    keeps_lr = is_set(agreed.plan.set_keys, "optim.lr")
    values, line = fit_batch(agreed.config, world, agreed.data.source, keeps_lr)
    return request.with_chosen("batch", values, line)


def find_rate(agreed: Agreed, world: World) -> RangeTest:
    """Find the learning rate with a state that is thrown away: the run builds another one. Collective.

    Raises:
        ConfigError: no rate can be chosen.
    """
    config, source, schedule = agreed.config, agreed.data.source, agreed.schedule
    first = schedule.stages[0]
    if world.is_leader:
        print("--lr find: training with a growing learning rate, at most 100 steps", flush=True)
    state, network = build_network(config, world, source, schedule, agreed.folder)
    # The test ends itself when the loss is not finite.
    step = TrainStep(network, build_augment(config), seed=config.seed, max_skipped_steps=first.stop_step + 1)
    loader = build_loader(config, world, source, schedule, start_step=0)
    try:
        test = run_range_test(config, state, step, loader, steps=first.stop_step, lr_factor=first.lr_factor)
    finally:
        loader.close()
    del state, network, step
    gc.collect()  # the memory may not hold a second network and its head
    return test


def with_rate(request: TrainRequest, config: Config, test: RangeTest) -> TrainRequest:
    """Return the request with the learning rate of a test; the rate of Muon keeps its ratio to it."""
    return request.with_chosen("lr", rate_values(config, test.lr), test.describe())


def rate_values(config: Config, lr: float) -> dict[str, float]:
    """Return the config keys of a learning rate, and of the rate of Muon, which keeps its ratio to it."""
    values = {"optim.lr": lr}
    if config.optim.muon:
        values["optim.muon.lr"] = config.optim.muon.lr * lr / config.optim.lr
    return values
