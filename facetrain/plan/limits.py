"""What would fit: the largest batch, the most identities, and the cheapest change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from facetrain.config.schema import Config
from facetrain.plan.forecast import backbone_cost, forecast, local_batch

USABLE = 0.95
"""Share of a device's memory that a plan may fill; the rest is lost between the allocator's blocks."""
_MOST = 1 << 34


def fits(config: Config, num_classes: int, gpus: int, memory: int, *, cuda: bool = True) -> bool:
    """Tell whether the rank that needs most has enough with `memory` bytes."""
    return forecast(config, num_classes, gpus, cuda=cuda).total <= USABLE * memory


def largest_batch(config: Config, num_classes: int, gpus: int, memory: int, *, cuda: bool = True) -> int:
    """Return the most images per rank and micro-batch that fit; 0 if not even two do."""
    cost = backbone_cost(config, gpus)
    return _largest(
        lambda batch: (
            forecast(config, num_classes, gpus, batch=batch, cost=cost, cuda=cuda).total <= USABLE * memory
        )
    )


def most_identities(config: Config, gpus: int, memory: int, *, cuda: bool = True) -> int:
    """Return the most classes that fit with the config's batch; 0 if the backbone alone does not."""
    if config.head.placement == "disk":
        return _MOST
    cost = backbone_cost(config, gpus)
    return _largest(
        lambda classes: forecast(config, classes, gpus, cost=cost, cuda=cuda).total <= USABLE * memory,
        least=gpus,
    )


def _largest(holds: Callable[[int], bool], least: int = 2) -> int:
    if not holds(least):
        return 0
    low, high = least, 2 * least
    while high < _MOST and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Change:
    """Keys of a config to change, and what that costs."""

    keys: dict[str, Any]
    price: str

    def applied(self, config: Config) -> Config:
        """Return a config with the keys changed."""
        values = json.loads(config.model_dump_json(by_alias=True))
        for key, value in self.keys.items():
            *sections, name = key.split(".")
            section = values
            for part in sections:
                section = section[part]
            section[name] = value
        return Config.model_validate(values)

    def overrides(self) -> str:
        """Return the change as options of the command line."""
        return " ".join(f"--set {key}={json.dumps(value)}" for key, value in self.keys.items())


def cheapest_change(
    config: Config, num_classes: int, gpus: int, memory: int, *, cuda: bool = True
) -> Change | None:
    """Return the first change that makes the run fit, from cheap to dear, then all of them heaped up."""
    heap: dict[str, Any] = {}
    changes = _changes(config, gpus, cuda=cuda)
    for change in changes:
        if fits(change.applied(config), num_classes, gpus, memory, cuda=cuda):
            return change
    for change in changes:
        heap |= change.keys
        together = Change(
            heap, "together: " + "; ".join(c.price for c in changes if c.keys.items() <= heap.items())
        )
        if fits(together.applied(config), num_classes, gpus, memory, cuda=cuda):
            return together
    return None


def _changes(config: Config, gpus: int, *, cuda: bool) -> list[Change]:
    head, batch = config.head, local_batch(config, gpus)
    changes = []
    if head.momentum_dtype == "float32":
        changes.append(
            Change({"head.momentum_dtype": "bfloat16"}, "momentum of centers rounded to 8 bits of mantissa")
        )
    if not config.model.checkpoint_activations:
        changes.append(Change({"model.checkpoint_activations": True}, "a third more time in the backbone"))
    if batch >= 4 and batch % 2 == 0:
        smaller = ({} if config.train.global_batch_size else {"train.batch_size": batch // 2}) | {
            "optim.accumulate": 2 * config.optim.accumulate
        }
        changes.append(Change(smaller, "the same global batch in twice as many parts; batch norm sees half"))
    if head.weight_dtype == "float32":
        changes.append(
            Change({"head.weight_dtype": "bfloat16"}, "centers stored in 16 bits, rounded at random")
        )
    if config.optim.name == "sgd" and head.momentum_dtype != "int8":
        changes.append(Change({"head.momentum_dtype": "int8"}, "momentum of centers in 8 bits"))
    if head.placement == "device" and cuda:
        rate = {"head.sample_rate": 0.1} if head.sample_rate > 0.1 else {}
        changes.append(
            Change(
                {"head.placement": "host"} | rate, "the sampled centers travel to the GPU and back each step"
            )
        )
    return changes
