"""Reports of the training metrics, and the checks that come with them."""

from __future__ import annotations

from collections.abc import Callable

from facetrain.data.loading.loader import Batch
from facetrain.data.loading.staged_loader import StagedLoader
from facetrain.errors import SkippedError
from facetrain.run.build.step_schedule import StepSchedule
from facetrain.run.outputs import RunOutputs
from facetrain.telemetry.memory import peak_gib
from facetrain.training.learning_check import LearningCheck
from facetrain.training.state import TrainState
from facetrain.training.step import TrainStep


class Logging:
    """Reports loss, rates and loss spikes, and ends a run that diverges or whose data is too bad.

    The host waits for the GPU here, and only here: everything that needs a value of the device is done together.
    """

    def __init__(
        self,
        outputs: RunOutputs,
        step: TrainStep,
        loader: StagedLoader,
        schedule: StepSchedule,
        *,
        max_skipped_images: int | None,
        learning_check: LearningCheck | None = None,
        check_lock: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the outputs, and what they report on.

        `max_skipped_images` is the largest number of unreadable images on all ranks together (None: no limit).
        `check_lock` raises an error if another process writes the run.
        """
        self._outputs, self._step, self._loader, self._schedule = outputs, step, loader, schedule
        self._max_skipped = max_skipped_images
        self._learning_check, self._check_lock = learning_check, check_lock

    def announce_stage(self, state: TrainState) -> None:
        """Report the stage that begins with the next step, if one does and the run has several."""
        stages = self._schedule.stages
        for number, stage in enumerate(stages, start=1):
            if stage.first_step == state.step and len(stages) > 1:
                self._outputs.report(
                    f"stage {number} of {len(stages)}, from step {stage.first_step:,} (epoch {stage.first_epoch}) to "
                    f"step {stage.stop_step:,}: {stage.describe()}"
                )

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
            "left_s": self._schedule.images_after(state.step) / max(values["images_per_s"], 1e-9),
            "wait_s": self._loader.wait_s,
            "peak_memory_gib": peak_gib(state.world.device),
            "skipped_images": float(len(state.skipped_images)),
        }
        self._outputs.recorder.write(state.step, values)
        self._check_learning(state, values)
        self._check_skipped(state)

    def report_spikes(self, state: TrainState) -> None:
        """Report the loss spikes since the last call. Collective; waits for the device."""
        for spike in state.spike_detector.report() if state.spike_detector else []:
            line = (
                f"loss spike at step {spike['step']}: {spike['loss']:.4g}, where the median is "
                f"{spike['median']:.4g} (gradient norm {spike['grad_norm']:.3g}); loss_spikes.jsonl lists its images"
            )
            self._outputs.warn(line)
            self._outputs.spike_recorder.write(spike["step"], spike)

    def _check_learning(self, state: TrainState, values: dict[str, float]) -> None:
        """Report once if the first steps are no better than chance. Collective."""
        if self._learning_check is None or self._learning_check.is_finished:
            return
        line = self._learning_check.observe(state.step, values, *state.head.take_nearest())
        if line:
            self._outputs.warn(line)

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
