"""Reports of the training metrics, the checks that come with them, and the outputs that they go to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from facetrain.config.loading import dump_config, plain_config
from facetrain.config.schema import Config
from facetrain.data.loading.loader import Batch
from facetrain.data.loading.staged_loader import TrainLoader
from facetrain.errors import SkippedError
from facetrain.telemetry.console import Console
from facetrain.telemetry.jsonl import JsonLines
from facetrain.telemetry.log import logger
from facetrain.telemetry.memory import peak_gib
from facetrain.telemetry.mlflow import MLflow
from facetrain.telemetry.recorder import OptionalSink, Recorder, Sink
from facetrain.telemetry.tensorboard import TensorBoard
from facetrain.telemetry.wandb import WandB
from facetrain.training.learning_check import LearningCheck
from facetrain.training.state import TrainState
from facetrain.training.step import TrainStep


class Logging:
    """Reports loss, rates and loss spikes, and ends a run that diverges or whose data is too bad.

    The host waits for the GPU here, and only here: everything that needs a value of the device is done together.
    """

    def __init__(
        self,
        recorder: Recorder,
        spike_recorder: Recorder,
        step: TrainStep,
        loader: TrainLoader,
        print_message: Callable[[str], None],
        *,
        images_after: Callable[[int], int],
        max_skipped_images: int | None,
        learning_check: LearningCheck | None = None,
        check_lock: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the recorders of metrics and of loss spikes, and what they report on.

        `images_after` returns the images that the run trains on after a step. `max_skipped_images` is the largest
        number of unreadable images on all ranks together (None: no limit). `check_lock` raises an error if another
        process writes the run.
        """
        self._check_lock = check_lock
        self._recorder, self._spike_recorder = recorder, spike_recorder
        self._step, self._loader, self._print = step, loader, print_message
        self._images_after, self._max_skipped = images_after, max_skipped_images
        self._learning_check = learning_check

    def report(self, state: TrainState, batches: tuple[Batch, ...]) -> None:
        """Report the mean of every metric since the last report. Collective; waits for the device.

        Raises:
            DivergedError: the loss or the gradient was not finite in too many consecutive steps.
            SkippedError: more images could not be read than the config allows.
        """
        self._check_lock()
        self._step.check_divergence(state, batches)
        self.report_spikes(state)
        state.add_skipped_images(self._loader.skipped)
        values = state.meter.report()
        values |= {
            "epoch": float(batches[-1].epoch),
            "left_s": self._images_after(state.step) / max(values["images_per_s"], 1e-9),
            "wait_s": self._loader.wait_s,
            "peak_memory_gib": peak_gib(state.world.device),
            "skipped_images": float(len(state.skipped_images)),
        }
        self._recorder.write(state.step, values)
        self._check_learning(state, values)
        self._check_skipped(state)

    def report_spikes(self, state: TrainState) -> None:
        """Report the loss spikes since the last call. Collective; waits for the device."""
        for spike in state.spike_detector.report() if state.spike_detector else []:
            line = (
                f"loss spike at step {spike['step']}: {spike['loss']:.4g}, where the median is "
                f"{spike['median']:.4g} (gradient norm {spike['grad_norm']:.3g}); loss_spikes.jsonl lists its images"
            )
            logger.warning(line)
            self._print(f"warning: {line}")
            self._spike_recorder.write(spike["step"], spike)

    def _check_learning(self, state: TrainState, values: dict[str, float]) -> None:
        """Report once if the first steps are no better than chance. Collective."""
        if self._learning_check is None or self._learning_check.is_finished:
            return
        line = self._learning_check.observe(state.step, values, *state.head.take_nearest())
        if line:
            logger.warning(line)
            self._print(f"warning: {line}")

    def _check_skipped(self, state: TrainState) -> None:
        """Raise SkippedError on all ranks if all of them together have skipped too many images."""
        skipped = len(state.skipped_images)
        if self._max_skipped is None or skipped <= self._max_skipped:
            return
        local = self._loader.skipped
        example = f" (rank {state.world.rank}: {local[-1]})" if local else ""
        raise SkippedError(
            f"step {state.step}: {skipped:,} images could not be read, more than data.max_skipped "
            f"({self._max_skipped:,}) allows{example}; `facetrain data check --repair` writes a dataset without them"
        )


def open_recorder(
    config: Config, folder: Path, console: Console, *, run_id: str, resume_at: int | None
) -> Recorder:
    """Open metrics.jsonl, TensorBoard, Weights & Biases and MLflow. For the leader only.

    Args:
        config: config of the run.
        folder: run folder. TensorBoard and the services get its name as the name of the run.
        console: progress on the terminal, which is one of the sinks.
        run_id: id of the run, for every record of metrics.jsonl.
        resume_at: step from which the run continues; None for a new run.
    """
    journal = JsonLines(folder / "metrics.jsonl", resume_at=resume_at, run_id=run_id)
    sinks: list[Sink] = [console, *_optional_sinks(config, folder, resumed=resume_at is not None)]
    board = _open_tensorboard(config, folder, resume_at) if config.log.tensorboard else None
    return Recorder(sinks, board, journal)


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
