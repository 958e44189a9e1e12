"""Speeds that arcface_torch's authors published for V100, and the fit of the speed forecast to them.

python -m tests.support.published_speeds        print the fitted constants of facetrain/plan/device.py
"""

from __future__ import annotations

import numpy as np

from facetrain.config.loading import load_config
from facetrain.config.schema import Config
from facetrain.plan import device
from facetrain.plan.backbone_cost import backbone_cost
from facetrain.plan.memory_traffic import weight_bytes
from facetrain.plan.speed import StepTime, step_time
from facetrain.run.parts.step_schedule import local_batch_size
from tests.support.command import ROOT

V100 = device.DEVICES["v100"]
# Identities → images per second: all classes split over the ranks; and a tenth of them in each step.
ALL = {125e3: 4824, 250e3: 4521, 500e3: 4013, 1e6: 3449, 1.4e6: 3043, 2e6: 2593, 4e6: 1748, 5.5e6: 1389}
TENTH = {
    125e3: 5004, 250e3: 4976, 500e3: 4900, 1e6: 4803, 1.4e6: 4738, 2e6: 4626, 4e6: 4208, 5.5e6: 3975,
    8e6: 3565, 16e6: 2679, 29e6: 1855,
}  # fmt: skip
# Config, number of GPUs (their kind is not in these logs) → images per second: the median of the log, or its table.
RUNS = {
    ("ms1mv3_r50", 8): 5552, ("ms1mv3_r100", 8): 3407, ("ms1mv3_mbf", 8): 10538, ("wf4m_r50", 8): 5398,
    ("wf4m_r100", 8): 3322, ("glint360k_r100", 8): 3157, ("wf42m_pfc02_8gpus_r50_bs4k", 8): 5971,
    ("wf42m_pfc02_16gpus_r50_bs8k", 16): 10502, ("wf42m_pfc02_32gpus_r50_bs4k", 32): 17000,
    ("wf42m_pfc02_16gpus_r100", 16): 5452, ("wf42m_pfc02_r100_32gpus", 32): 9800,
    ("wf42m_pfc02_16gpus_mbf_bs8k", 16): 18525,
}  # fmt: skip
FITTED_TO = [
    *((name, gpus, None, speed) for (name, gpus), speed in RUNS.items()),
    ("glint360k_r50", 8, 125_000, 5004),
]


def published_config(name: str = "glint360k_r50", *overrides: str) -> Config:
    """Return a config of the repository in fp16, as published."""
    return load_config(ROOT / "configs" / f"{name}.yaml", ["train.precision=fp16", *overrides])


def published_step(config: Config, num_classes: int, gpus: int) -> tuple[StepTime, float]:
    """Return the forecast of a step on V100, and the images per second of arcface_torch by it."""
    forecast = step_time(config, num_classes, gpus, V100)
    return forecast, forecast.images / (forecast.seconds + device.ARCFACE_TORCH_SECONDS)


def fit() -> dict[str, float]:
    """Return the constants with the least squares of the relative errors; head and network are as forecast."""
    rows, rest = [], []
    for name, gpus, classes, speed in FITTED_TO:
        config = published_config(name)
        forecast, _ = published_step(config, classes or config.data.num_classes or 0, gpus)
        cost, batch = backbone_cost(config, gpus), local_batch_size(config, gpus)
        seconds = forecast.images / speed
        moved = cost.step.moved(batch) + weight_bytes(cost.parameters, config.optim.moments)
        products = batch * cost.step.flops_per_image / V100.flops_16
        rows.append(np.array([1.0, products, moved / V100.memory_bytes]) / seconds)
        rest.append(1 - (forecast.head + forecast.network) / seconds)
    constant, products, memory = np.linalg.lstsq(np.stack(rows), np.array(rest), rcond=None)[0]
    return {
        "ARCFACE_TORCH_SECONDS": constant,
        "PRODUCTS_REACHED": 1 / products,
        "memory_reached": 1 / memory,
    }


if __name__ == "__main__":
    for name, value in fit().items():
        print(f"{name} = {value:.3f}")
