"""Changes of a config with which a run needs less memory, from cheap to expensive."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from facetrain.config.loading import build_config, override_values, plain_config
from facetrain.config.schema import Config
from facetrain.errors import ConfigError
from facetrain.plan.limits import MemoryBudget
from facetrain.run.build.step_schedule import local_batch_size, stage_configs


@dataclass(frozen=True)
class Change:
    """Keys of a config to change, and the price of the change."""

    keys: dict[str, Any]
    price: str
    """What the change costs in time or accuracy."""

    def applied(self, config: Config) -> Config:
        """Return a config with the keys changed.

        Raises:
            ConfigError: the change contradicts other keys of the config.
        """
        return build_config(override_values(plain_config(config), self.keys), "plan")

    def overrides(self) -> str:
        """Return the change as options of the command line."""
        values = {
            key: value if isinstance(value, str) else json.dumps(value) for key, value in self.keys.items()
        }
        return " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in values.items())


def cheapest_change(config: Config, num_classes: int, budget: MemoryBudget) -> Change | None:
    """Return the cheapest change with which the run fits: a single one, or else several together.

    Single changes are tried from cheap to expensive; then they are combined in that order. None: nothing fits.
    """
    for propose in _PROPOSALS:
        proposed = _possible(propose, config, budget)
        if proposed and budget.fits(proposed[1], num_classes):
            return proposed[0]
    changes: list[Change] = []
    keys: dict[str, Any] = {}
    for propose in _PROPOSALS:
        proposed = _possible(propose, config, budget)
        if proposed is None:
            continue
        change, config = proposed
        changes.append(change)
        keys |= change.keys
        if budget.fits(config, num_classes):
            # A later change may replace the value of an earlier one, whose price is then not paid.
            prices = [c.price for c in changes if any(keys[key] == value for key, value in c.keys.items())]
            return Change(keys, "together: " + "; ".join(prices))
    return None


_HIGHEST_RATE = 0.1
"""Fraction of the classes that a step can copy to a GPU and back without taking much longer."""

_Proposal = Callable[[Config, MemoryBudget], Change | None]


def _possible(propose: _Proposal, config: Config, budget: MemoryBudget) -> tuple[Change, Config] | None:
    """Return the proposed change and the config with it; None if there is none, or it contradicts the config."""
    change = propose(config, budget)
    if change is None:
        return None
    try:
        return change, change.applied(config)
    except ConfigError:
        return None


def _halve_momentum(config: Config, budget: MemoryBudget) -> Change | None:
    if config.head.momentum_dtype != "float32":
        return None
    price = "momentum of the centers rounded to 8 bits of mantissa"
    return Change({"head.momentum_dtype": "bfloat16"}, price)


def _checkpoint_activations(config: Config, budget: MemoryBudget) -> Change | None:
    if config.model.checkpoint_activations:
        return None
    keys: dict[str, Any] = {"model.checkpoint_activations": True}
    without = ""
    if config.train.fused == "on":  # a run refuses both
        keys["train.fused"], without = "off", ", without train.fused"
    if config.train.compile == "reduce-overhead":
        keys["train.compile"] = "on"
    return Change(keys, f"the backbone takes a third more time{without}")


def _halve_batch(config: Config, budget: MemoryBudget) -> Change | None:
    batch = local_batch_size(config, budget.gpus)
    of_stages = [local_batch_size(staged, budget.gpus) for _, staged, _ in stage_configs(config)]
    if any(size < 4 or size % 2 for size in (batch, *of_stages)):
        return None
    keys: dict[str, Any] = {"optim.accumulate": 2 * config.optim.accumulate}
    if not config.train.global_batch_size:
        keys |= {"train.batch_size": batch // 2} | _in_stages(config, "batch_size", lambda size: size // 2)
    price = "the same global batch in twice as many micro-batches; batch norm sees half as many images"
    return Change(keys, price)


def _halve_centers(config: Config, budget: MemoryBudget) -> Change | None:
    if config.head.weight_dtype != "float32":
        return None
    return Change({"head.weight_dtype": "bfloat16"}, "centers stored in 16 bits, with stochastic rounding")


def _quarter_momentum(config: Config, budget: MemoryBudget) -> Change | None:
    if config.optim.name != "sgd" or config.head.momentum_dtype == "int8":
        return None
    return Change({"head.momentum_dtype": "int8"}, "momentum of the centers stored in 8 bits")


def _move_centers(config: Config, budget: MemoryBudget) -> Change | None:
    if config.head.placement != "device" or not budget.cuda:
        return None
    sampling = {"head.sample_rate": _HIGHEST_RATE} if config.head.sample_rate > _HIGHEST_RATE else {}
    sampling |= _in_stages(config, "sample_rate", lambda rate: min(rate, _HIGHEST_RATE))
    price = "the sampled centers are copied to the GPU and back in each step"
    return Change({"head.placement": "host"} | sampling, price)


def _in_stages(config: Config, key: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return `train.stages` with changed values in the stages that have the key; nothing if they stay as they are."""
    stages = [stage.model_dump(exclude_none=True) for stage in config.train.stages]
    changed = [stage | {key: change(stage[key])} if key in stage else stage for stage in stages]
    return {"train.stages": changed} if changed != stages else {}


_PROPOSALS: tuple[_Proposal, ...] = (
    _halve_momentum,
    _checkpoint_activations,
    _halve_batch,
    _halve_centers,
    _quarter_momentum,
    _move_centers,
)
"""Proposals of changes, from cheap to expensive; each returns None if the config leaves nothing to change."""
