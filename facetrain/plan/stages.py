"""Forecast of the memory of a run in stages (`train.stages`)."""

from __future__ import annotations

from typing import NamedTuple

from facetrain.config.schema import Config
from facetrain.plan.forecast import Forecast, forecast
from facetrain.run.build.step_schedule import stage_configs


class StageForecast(NamedTuple):
    """Memory of a stage."""

    needed: Forecast
    config: Config
    """Config with the values of the stage."""


def forecast_stages(
    config: Config, num_classes: int, gpus: int, *, batch: int | None = None, cuda: bool = True
) -> StageForecast:
    """Return the forecast of the stage that needs most; a run without stages has one.

    Args:
        config: run description.
        num_classes: classes of the whole head.
        gpus: ranks of the whole run; processes if `cuda` is false.
        batch: images per rank and micro-batch in all stages; None: those of the config and its stages.
        cuda: forecast for GPUs, else for processes on a CPU.

    Raises:
        ConfigError, ModelError, CheckpointError, DataError: as `forecast`.
    """
    forecasts = (
        StageForecast(
            forecast(staged, num_classes, gpus, run=config, batch=batch, cuda=cuda, image_size=size), staged
        )
        for _, staged, size in stage_configs(config)
    )
    # Where verification needs most, all stages need the same: the one with the largest step describes the run.
    return max(forecasts, key=lambda stage: (stage.needed.total, stage.needed.activations))
