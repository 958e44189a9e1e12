"""Reports of the training metrics, and the checks that come with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from facetrain.data.loading.loader import Batch
from facetrain.data.loading.staged_loader import StagedLoader
from facetrain.errors import SkippedError
from facetrain.run.outputs import RunOutputs
from facetrain.run.parts.step_schedule import StepSchedule
from facetrain.telemetry.memory import peak_gib
from facetrain.text import count_text
from facetrain.training.learning_check import LearningCheck
from facetrain.training.state import TrainState
from facetrain.training.step import TrainStep


class _BegunReport(NamedTuple):
    step: int
    values: dict[str, float]
    """Those that the host knows."""
    means: Callable[[], dict[str, float]]
    """Waits for the others."""


@dataclass
class Logging:
    """Reports loss and rates, and ends a run that diverges or whose data is too bad.

    Everything that needs a value of the device is done together.
    """

    outputs: RunOutputs
    step: TrainStep
    loader: StagedLoader
    schedule: StepSchedule
    max_skipped_images: int | None
    """Largest number of unreadable images on all ranks together; None: no limit."""
    learning_check: LearningCheck | None = None
    check_lock: Callable[[], None] = lambda: None
    """Raises an error if another process writes the run."""
    has_learned: bool = field(default=True, init=False)
    """Whether the check of the first steps has found nothing."""
    _begun: _BegunReport | None = field(default=None, init=False)

    def announce_stage(self, state: TrainState) -> None:
        """Report the stage that begins with the next step, if one does and the run has several."""
        stages = self.schedule.stages
        for number, stage in enumerate(stages, start=1):
            if stage.first_step == state.step and len(stages) > 1:
                self.outputs.report(
                    f"stage {number} of {len(stages)}, from step {stage.first_step:,} (epoch {stage.first_epoch}) to "
                    f"step {stage.stop_step:,}: {stage.describe()}"
                )

    def advance(self, state: TrainState) -> None:
        """Move the progress bar; the host does not wait for the device."""
        self.outputs.advance(state.step)

    def report(self, state: TrainState, batches: tuple[Batch, ...], *, at_once: bool) -> None:
        """Report the mean of every metric since the last report. Collective.

        On a GPU it does not wait: `finish` writes the report, while the GPU already computes the next step. With
        `at_once` it waits for the device, and checks the network, which is verified or saved then.

        Raises:
            DivergedError: the loss or the gradient was not finite in too many consecutive steps, or the network is not.
            SkippedError: more images could not be read than the config allows.
        """
        self.check_lock()
        if at_once:
            self.step.require_finite_network(state, batches)
        state.add_skipped_images(self.loader.skipped)
        values = {
            "epoch": float(batches[-1].epoch),
            "wait_s": self.loader.wait_s,
            "peak_memory_gib": peak_gib(state.world.device),
            "skipped_images": float(len(state.skipped_images)),
        }
        self._begun = _BegunReport(state.step, values, state.meter.take())
        # The check reads counts of the device beside the means, which would have grown by then.
        checks = self.learning_check is not None and not self.learning_check.is_finished
        if at_once or checks or state.world.device.type == "cpu":
            self.finish(state, batches)

    def finish(self, state: TrainState, batches: tuple[Batch, ...]) -> None:
        """Write the report that `report` has begun, if there is one. Collective.

        Raises: as `report`.
        """
        if self._begun is None:
            return
        step, values, means = self._begun
        self._begun = None
        values = means() | values
        # By images and not by steps: those of another stage take another time.
        values["left_s"] = self.schedule.images_after(step) / max(values["images_per_s"], 1e-9)
        # First, because it raises: a report of a network that has diverged would be recorded as one more step.
        if values.get("skipped"):
            self.step.check_divergence(state, batches)
        self.outputs.write(step, values)
        if self.learning_check is not None and not self.learning_check.is_finished:
            line = self.learning_check.observe(step, values, *state.head.take_nearest())
            if line:
                self.has_learned = False
                self.outputs.warn(line)
        # Last, so that the report from which the user sees what happened is written.
        self._check_skipped(state)

    def check(self, state: TrainState, batches: tuple[Batch, ...]) -> None:
        """Write the report that `report` has begun, if there is one, and check this step. Collective.

        Waits for the device.

        Raises: as `report`.
        """
        self.finish(state, batches)
        self.step.require_finite_network(state, batches)
        state.add_skipped_images(self.loader.skipped)
        self.step.check_divergence(state, batches)
        self._check_skipped(state)

    def _check_skipped(self, state: TrainState) -> None:
        """Raise SkippedError on all ranks if all of them together have skipped too many images."""
        # The list of all ranks decides, which is the same on each, so that all of them raise.
        skipped = state.skipped_images
        if self.max_skipped_images is not None and len(skipped) > self.max_skipped_images:
            raise SkippedError(
                f"step {state.step}: {count_text(len(skipped), 'image')} could not be read, more than data.max_skipped "
                f"({self.max_skipped_images:,}) allows; the first: {min(skipped)}; `facetrain data check --repair` "
                "writes a dataset without them"
            )
