"""Outputs of the metrics of a run: the recorder with all sinks that the config names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from facetrain.config.loading import dump_config, plain_config
from facetrain.config.schema import Config
from facetrain.telemetry.console import Console
from facetrain.telemetry.jsonl import JsonLines
from facetrain.telemetry.mlflow import MLflow
from facetrain.telemetry.recorder import OptionalSink, Recorder, Sink
from facetrain.telemetry.tensorboard import TensorBoard
from facetrain.telemetry.wandb import WandB


def open_recorder(config: Config, folder: Path, console: Console, *, resume_at: int | None) -> Recorder:
    """Open metrics.jsonl, TensorBoard, Weights & Biases and MLflow. For the leader only.

    Args:
        config: config of the run.
        folder: run folder. TensorBoard and the services get its name as the name of the run.
        console: progress on the terminal, which is one of the sinks.
        resume_at: step from which the run continues; None for a new run.
    """
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", resume_at=resume_at), console]
    sinks += _optional_sinks(config, folder, resumed=resume_at is not None)
    return Recorder(sinks, _open_tensorboard(config, folder, resume_at) if config.log.tensorboard else None)


def _open_tensorboard(config: Config, folder: Path, resume_at: int | None) -> TensorBoard:
    # In a folder of its own name, because TensorBoard names a run after its folder below --logdir.
    board = TensorBoard(folder / "tensorboard" / folder.resolve().name, resume_at=resume_at)
    board.show_text(resume_at or 0, "config", dump_config(config))
    return board


def _optional_sinks(config: Config, folder: Path, *, resumed: bool) -> Iterator[Sink]:
    log = config.log
    described: dict[str, Any] = {
        "name": folder.resolve().name,
        "config": plain_config(config),
        "resumed": resumed,
    }
    if log.wandb is not None:
        yield OptionalSink("log.wandb", partial(WandB, folder, project=log.wandb, **described))
    if log.mlflow is not None:
        experiment = log.mlflow_experiment
        open_sink = partial(MLflow, folder, uri=log.mlflow, experiment=experiment, **described)
        yield OptionalSink("log.mlflow", open_sink)
