"""Numbers that the forecast expects of a GPU session."""

from __future__ import annotations

from typing import Any

import torch

from facetrain.config.loading import build_config
from facetrain.config.schema import Config
from facetrain.plan.device import DEVICES, Device
from facetrain.plan.forecast import forecast, head_load
from facetrain.plan.head_cost import head_work, table_bytes
from facetrain.plan.speed import StepTime, head_seconds, step_time

_REHEARSED = "h200"
"""Kind of GPU whose forecast a rehearsal without a GPU writes."""


def device_kind() -> Device | None:
    """Return the constants of this machine's GPU; None if the forecast does not know it."""
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else _REHEARSED
    return next((device for kind, device in DEVICES.items() if kind in name), None)


def run_config(keys: dict[str, Any], device: str) -> Config:
    """Return the config of a run without verification; `keys` are keys such as `train.precision` and their values."""
    values: dict[str, Any] = {"data": {"train": "generated"}, "eval": {"targets": []}}
    for key, value in ({"train.device": device} | keys).items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    return build_config(values, "GPU session")


def expected_step(config: Config, num_classes: int, gpus: int = 1) -> StepTime | None:
    """Return the forecast of a step on GPUs of this machine's kind."""
    device = device_kind()
    return step_time(config, num_classes, gpus, device) if device else None


def expected_head(config: Config, num_classes: int) -> tuple[float | None, int]:
    """Return the forecast of the head's step in seconds, and its bytes."""
    device, load = device_kind(), head_load(config, num_classes, 1, config.train.batch_size or 1)
    work = head_work(load)
    seconds = head_seconds(load, device) if device else None
    return seconds, sum(table_bytes(load)) + max(work.peak, work.update)


def expected_peak(config: Config, num_classes: int) -> int:
    """Return the forecast of the bytes that a step allocates on the GPU: without CUDA's context and verification."""
    parts = forecast(config, num_classes, 1).parts()
    return sum(value for name, value in parts.items() if name not in ("runtime", "verification", "saving"))
