"""Numbers that the forecast expects of a GPU session."""

from __future__ import annotations

from typing import Any

from facetrain.config.loading import build_config, override_values
from facetrain.config.schema import Config
from facetrain.plan.forecast import forecast, head_load
from facetrain.plan.head_memory import head_memory


def run_config(keys: dict[str, Any], device: str) -> Config:
    """Return the config of a run without verification; `keys` are keys such as `train.precision` and their values."""
    values: dict[str, Any] = {"data": {"train": "generated"}, "eval": {"targets": []}}
    keys = {"train.device": device, "train.precision": "bf16"} | keys
    return build_config(override_values(values, keys), "GPU session")


def expected_head(config: Config, num_classes: int) -> int:
    """Return the forecast of the bytes of the head's step."""
    head = head_memory(head_load(config, num_classes, 1, config.train.batch_size or 1, (config.head,)))
    return head.centers + head.moments + max(head.peak, head.update)


def expected_peak(config: Config, num_classes: int) -> int:
    """Return the forecast of the bytes that a step allocates on the GPU: without verification."""
    parts = forecast(config, num_classes, 1).parts
    return sum(value for name, value in parts.items() if name != "verification")


def most_identities(config: Config, memory: int) -> int:
    """Return about the most identities with which the forecast of one GPU takes at most `memory` bytes."""
    low, high = 1, 1 << 34
    while high - low > low // 1000:
        middle = (low + high) // 2
        low, high = (middle, high) if expected_peak(config, middle) <= memory else (low, middle)
    return low
