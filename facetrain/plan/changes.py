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

_HIGHEST_RATE = 0.1
"""Fraction of the classes that a step can copy to a GPU and back without taking much longer."""


@dataclass(frozen=True)
class Change:
    """Keys of a config to change, and the price of the change."""

    keys: dict[str, Any]
    price: str
    """What the change costs in time or accuracy."""

    def applied(self, config: Config) -> Config | None:
        """Return a config with the keys changed; None if the change contradicts other keys."""
        try:
            return build_config(override_values(plain_config(config), self.keys), "plan")
        except ConfigError:
            return None

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
    proposed = _proposals(config, budget)
    for change in proposed.values():
        if (changed := change.applied(config)) and budget.fits(changed, num_classes):
            return change
    changes: list[Change] = []
    keys: dict[str, Any] = {}
    for name in proposed:
        # Proposed anew: the changes before may have changed the stages.
        change = _proposals(config, budget)[name]
        if (changed := change.applied(config)) is None:
            continue
        config = changed
        changes.append(change)
        keys |= change.keys
        if budget.fits(config, num_classes):
            # A later change may replace the value of an earlier one, whose price is then not paid.
            prices = [c.price for c in changes if any(keys[key] == value for key, value in c.keys.items())]
            return Change(keys, "together: " + "; ".join(prices))
    return None


def _proposals(config: Config, budget: MemoryBudget) -> dict[str, Change]:
    """Return the changes that the config leaves to make, by name, from cheap to expensive."""
    head, model, train = config.head, config.model, config.train
    found: dict[str, Change] = {}
    if head.momentum_dtype == "float32":
        price = "momentum of the centers rounded to 8 bits of mantissa"
        found["halve momentum"] = Change({"head.momentum_dtype": "bfloat16"}, price)
    if not model.checkpoint_activations:
        keys: dict[str, Any] = {"model.checkpoint_activations": True}
        without = ""
        if train.fused == "on":  # a run refuses both
            keys["train.fused"], without = "off", ", without train.fused"
        if train.compile == "reduce-overhead":
            keys["train.compile"] = "on"
        found["checkpoint activations"] = Change(keys, f"the backbone takes a third more time{without}")
    batch = local_batch_size(config, budget.gpus)
    of_stages = [local_batch_size(staged, budget.gpus) for _, staged, _ in stage_configs(config)]
    if all(size >= 4 and size % 2 == 0 for size in (batch, *of_stages)):
        keys = {"optim.accumulate": 2 * config.optim.accumulate}
        if not train.global_batch_size:
            keys |= {"train.batch_size": batch // 2} | _in_stages(
                config, "batch_size", lambda size: size // 2
            )
        price = "the same global batch in twice as many micro-batches; batch norm sees half as many images"
        found["halve batch"] = Change(keys, price)
    if head.weight_dtype == "float32":
        price = "centers stored in 16 bits, with stochastic rounding"
        found["halve centers"] = Change({"head.weight_dtype": "bfloat16"}, price)
    if config.optim.name == "sgd" and head.momentum_dtype != "int8":
        price = "momentum of the centers stored in 8 bits"
        found["quarter momentum"] = Change({"head.momentum_dtype": "int8"}, price)
    if head.placement == "device" and budget.cuda:
        keys = {"head.placement": "host"}
        if head.sample_rate > _HIGHEST_RATE:
            keys["head.sample_rate"] = _HIGHEST_RATE
        keys |= _in_stages(config, "sample_rate", lambda rate: min(rate, _HIGHEST_RATE))
        price = "the sampled centers are copied to the GPU and back in each step"
        found["move centers"] = Change(keys, price)
    return found


def _in_stages(config: Config, key: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return `train.stages` with changed values in the stages that have the key; nothing if they stay as they are."""
    stages = [stage.model_dump(exclude_none=True) for stage in config.train.stages]
    changed = [stage | {key: change(stage[key])} if key in stage else stage for stage in stages]
    return {"train.stages": changed} if changed != stages else {}
