"""Reports, verification, checkpoints and stopping between the steps of a run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from facetrain.checkpoint.save import CheckpointWriter, SaveFailed
from facetrain.data.loader import Batch, Loader
from facetrain.distributed import collectives
from facetrain.distributed.stop_request import Stopped, StopRequest, grace_s
from facetrain.errors import CheckpointError, SkippedError
from facetrain.telemetry.log import logger
from facetrain.telemetry.memory import peak_gib
from facetrain.telemetry.recorder import Recorder
from facetrain.train.state import TrainState, averaged_buffers
from facetrain.train.step import TrainStep
from facetrain.verify.figures import figure_images
from facetrain.verify.result import Result
from facetrain.verify.verifier import Verifier


class RunHooks:
    """The hooks of a real run."""

    def __init__(
        self,
        *,
        recorder: Recorder,
        spikes: Recorder,
        step: TrainStep,
        loader: Loader,
        verifier: Verifier,
        writer: CheckpointWriter,
        stop: StopRequest,
        meta: Callable[[TrainState], dict[str, Any]],
        say: Callable[[str], None],
        max_skipped: int | None,
        total_steps: int,
        log_every: int,
        verify_every: int,
        save_every: int,
        save_every_minutes: float | None,
    ) -> None:
        self._recorder, self._spikes, self._step, self._loader = recorder, spikes, step, loader
        self._verifier, self._writer, self._stop = verifier, writer, stop
        self._meta, self._say = meta, say
        self._max_skipped, self._total = max_skipped, total_steps
        self._log_every, self._verify_every, self._save_every = log_every, verify_every, save_every
        self._save_every_s = (save_every_minutes or float("inf")) * 60
        self._saved_at = time.monotonic()
        self._signal, self._minutes_due = 0, False
        self.last_saved: int | None = None
        self._failed = ""
        self._undrawn: tuple[int, dict[str, Result]] | None = None

    @property
    def signal(self) -> int:
        """The signal that the ranks have agreed to stop for; 0: none."""
        return self._signal

    def begin(self, state: TrainState, *, resumed: bool) -> None:
        """Verify what no verification has seen: a new run, and one that was stopped in the middle of one."""
        if resumed and not state.unverified:
            return
        self.verify_now(state)  # also finds out before days of training that verification works
        if state.unverified:
            self.save(state)
        elif resumed:
            self._draw(state)
            self.save_now(state)  # it is done: no later resume has to

    def log(self, state: TrainState, batches: tuple[Batch, ...]) -> None:
        """Report the means since the last report."""
        if state.step % self._log_every and state.step != self._total:
            return
        self._step.check(state, batches)
        self._tell_spikes(state)
        skipped = collectives.sum_(torch.tensor(len(self._loader.skipped))).item()
        values = state.meter.report()
        values |= {
            "epoch": float(batches[-1].epoch),
            "left_s": (self._total - state.step)
            * self._images(state, batches)
            / max(values["images_per_s"], 1e-9),
            "wait_s": self._loader.wait_s,
            "memory_gib": peak_gib(state.world.device),
            "skipped_images": float(skipped),
        }
        self._recorder.write(state.step, values)
        self._check_skipped(state, skipped)

    def verify(self, state: TrainState) -> None:
        """Score the network on every set."""
        self._draw(state)  # of a new run: its first step does not wait for a library that draws
        if state.step % self._verify_every and state.step != self._total:
            return
        self.verify_now(state)
        self._draw(state)

    def verify_now(self, state: TrainState) -> None:
        """Score the network on every set, and say so; where a signal comes first, leave it for later."""
        try:
            with averaged_buffers(state.backbone):
                results = dict(self._verifier(state.network))
        except Stopped:
            state.unverified = True
            return
        state.unverified = False
        if results:
            state.metrics = {
                f"{name}/{what}": value
                for name, result in results.items()
                for what, value in result.available_metrics.items()
            }
            self._recorder.write(state.step, state.metrics)
            self._undrawn = state.step, results
        state.meter.restart_clock()

    def save(self, state: TrainState) -> None:
        """Begin a checkpoint where one is due, and end the one in flight where all ranks have written it."""
        self._signal, self._minutes_due = self._stop.requested(
            time.monotonic() - self._saved_at > self._save_every_s
        )
        if self._signal:
            name = signal.Signals(self._signal).name
            self._say(
                f"{name}: saving step {state.step} and stopping, within {grace_s()} s of the signal"
                + ("; its verification is left to `facetrain resume`" if state.unverified else "")
            )
        if state.step % self._save_every == 0 or self._minutes_due or self._signal:
            self.save_now(state)
        elif self._writer.in_flight:
            self._tell(self._writer.poll())
        elif not self._writer.is_prepared:  # after the first step all that is ever saved exists
            self._writer.prepare(state.snapshot({}))

    def save_now(self, state: TrainState) -> None:
        """Begin a checkpoint."""
        self._saved_at = time.monotonic()
        self._tell_spikes(state)  # whoever goes on from here does not know them
        self._tell(self._writer.save(state.snapshot(self._meta(state))))

    def finish(self) -> None:
        """Wait for the checkpoint in flight."""
        self._tell(self._writer.finish())

    def insist(self, state: TrainState) -> None:
        """Refuse to call a run finished whose last checkpoint does not stand. All ranks decide alike.

        Raises:
            CheckpointError: it could not be written.
        """
        if self.last_saved != state.step:
            raise CheckpointError(
                f"the last checkpoint was not saved ({self._failed}); make room, and `facetrain resume` goes on "
                "from the one before"
            )

    def stopping(self, state: TrainState) -> bool:
        """Whether a signal has come to any rank."""
        return self._signal != 0

    def _check_skipped(self, state: TrainState, skipped: float) -> None:
        """Stop a run whose data is worse than its config allows. All ranks decide alike."""
        if self._max_skipped is not None and skipped > self._max_skipped:
            mine = self._loader.skipped
            raise SkippedError(
                f"step {state.step}: {skipped:,.0f} images could not be read, and data.max_skipped is "
                f"{self._max_skipped:,}"
                + (f" (rank {state.world.rank}: {mine[-1]})" if mine else "")
                + "; `facetrain data check --repair` writes a dataset without them"
            )

    def _draw(self, state: TrainState) -> None:
        """Draw of a verification what the report draws, where somebody will see it."""
        if self._undrawn is None or not self._recorder.has_board:
            return
        (step, results), self._undrawn = self._undrawn, None
        try:
            for name, result in results.items():
                images = figure_images(result)
                self._recorder.show(step, {f"{name}/{kind}": pixels for kind, pixels in images.items()})
        except Exception:  # whatever a library for drawing raises: days of training are worth more
            logger.warning("the figures of step %d were not drawn", step, exc_info=True)
        state.meter.restart_clock()

    def _tell_spikes(self, state: TrainState) -> None:
        for spike in state.spikes.report() if state.spikes else []:
            line = (
                f"the loss of step {spike['step']} leapt to {spike['loss']:.4g} from about {spike['median']:.4g} "
                f"(gradient norm {spike['grad_norm']:.3g}); loss_spikes.jsonl lists its images"
            )
            logger.warning(line)
            self._say(f"warning: {line}")
            self._spikes.write(spike["step"], spike)

    def _images(self, state: TrainState, batches: tuple[Batch, ...]) -> int:
        return sum(len(batch.label_B) for batch in batches) * state.world.size

    def _tell(self, outcome: object) -> None:
        if outcome is None:
            return
        if isinstance(outcome, SaveFailed):
            self._failed = outcome.reason
            line = f"checkpoint of step {outcome.step} was not saved: {outcome.reason}; training goes on"
            logger.warning(line)
            self._say(f"warning: {line}")
            self._recorder.write(outcome.step, {"save_failed": 1.0})
            return
        self.last_saved = outcome.step  # type: ignore[attr-defined]
        logger.info("saved the checkpoint of step %d", self.last_saved)
