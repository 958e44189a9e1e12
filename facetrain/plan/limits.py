"""Limits of a run on given memory: the largest batch, the most identities, and the cheapest change that fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from facetrain.config.schema import Config
from facetrain.plan.stages import forecast_stages
from facetrain.run.step_schedule import local_batch_size

USABLE = 0.95
"""Share of a device's memory that a plan may fill. The rest is for what is lost between the allocator's blocks."""
_LARGEST_ANSWER = 1 << 34
"""The search for a limit ends here: no dataset has so many identities."""


@dataclass(frozen=True)
class MemoryBudget:
    """Ranks of a run, and the memory that each may fill."""

    gpus: int
    """Ranks of the whole run; processes if `cuda` is false."""
    memory: int
    """Bytes of one GPU, or of one process."""
    cuda: bool = True
    """Whether the run is on GPUs; else it is on a CPU."""

    def fits(self, config: Config, num_classes: int, *, batch: int | None = None) -> bool:
        """Return whether the rank that needs most fits in all stages. `batch` is that of `forecast_stages`."""
        largest = forecast_stages(config, num_classes, self.gpus, batch=batch, cuda=self.cuda)
        return largest.needed.total <= USABLE * self.memory

    def largest_batch(self, config: Config, num_classes: int) -> int:
        """Return the most images per rank and micro-batch that fit; 0 if not even two fit."""
        return _largest_that(lambda batch: self.fits(config, num_classes, batch=batch))

    def most_identities(self, config: Config) -> int:
        """Return the most classes that fit with the config's batch; 0 if the backbone alone does not fit."""
        if config.head.placement == "disk":
            return _LARGEST_ANSWER
        return _largest_that(lambda classes: self.fits(config, classes), smallest=self.gpus)


def _largest_that(fits_with: Callable[[int], bool], smallest: int = 2) -> int:
    """Return the largest number that fits, by doubling and bisection; 0 if `smallest` does not fit."""
    if not fits_with(smallest):
        return 0
    low, high = smallest, 2 * smallest
    while high < _LARGEST_ANSWER and fits_with(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits_with(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Change:
    """Keys of a config to change, and the price of the change."""

    keys: dict[str, Any]
    price: str
    """What the change costs in time or accuracy."""

    def applied(self, config: Config) -> Config:
        """Return a config with the keys changed."""
        values = json.loads(config.model_dump_json(by_alias=True))
        for key, value in self.keys.items():
            *sections, name = key.split(".")
            section = values
            for section_name in sections:
                section = section[section_name]
            section[name] = value
        return Config.model_validate(values)

    def overrides(self) -> str:
        """Return the change as options of the command line."""
        return " ".join(f"--set {key}={json.dumps(value)}" for key, value in self.keys.items())


def cheapest_change(config: Config, num_classes: int, budget: MemoryBudget) -> Change | None:
    """Return the cheapest change with which the run fits: a single one, or else several together.

    Single changes are tried from cheap to expensive; then they are combined in that order. None: nothing fits.
    """
    changes = _possible_changes(config, budget)
    for change in changes:
        if budget.fits(change.applied(config), num_classes):
            return change
    keys: dict[str, Any] = {}
    for change in changes:
        keys |= change.keys
        # A later change may replace the value of an earlier one, whose price is then not paid.
        prices = [c.price for c in changes if c.keys.items() <= keys.items()]
        together = Change(keys, "together: " + "; ".join(prices))
        if budget.fits(together.applied(config), num_classes):
            return together
    return None


def _possible_changes(config: Config, budget: MemoryBudget) -> list[Change]:
    """Return the changes that this config allows, from cheap to expensive."""
    head, batch = config.head, local_batch_size(config, budget.gpus)
    changes = []
    if head.momentum_dtype == "float32":
        price = "momentum of the centers rounded to 8 bits of mantissa"
        changes.append(Change({"head.momentum_dtype": "bfloat16"}, price))
    if not config.model.checkpoint_activations:
        changes.append(Change({"model.checkpoint_activations": True}, "the backbone takes a third more time"))
    if batch >= 4 and batch % 2 == 0:
        keys = {} if config.train.global_batch_size else {"train.batch_size": batch // 2}
        keys["optim.accumulate"] = 2 * config.optim.accumulate
        price = "the same global batch in twice as many micro-batches; batch norm sees half as many images"
        changes.append(Change(keys, price))
    if head.weight_dtype == "float32":
        price = "centers stored in 16 bits, with stochastic rounding"
        changes.append(Change({"head.weight_dtype": "bfloat16"}, price))
    if config.optim.name == "sgd" and head.momentum_dtype != "int8":
        changes.append(Change({"head.momentum_dtype": "int8"}, "momentum of the centers stored in 8 bits"))
    if head.placement == "device" and budget.cuda:
        sampling = {"head.sample_rate": 0.1} if head.sample_rate > 0.1 else {}
        price = "the sampled centers are copied to the GPU and back in each step"
        changes.append(Change({"head.placement": "host"} | sampling, price))
    return changes
