"""Checkpoints of a run, saved while it trains, and the agreement of the ranks to save and to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from facetrain.checkpoint.save import CheckpointWriter, SaveOutcome
from facetrain.checkpoint.uploads import Uploads
from facetrain.distributed.grace_period import grace_s
from facetrain.distributed.stop_request import StopRequest
from facetrain.errors import CheckpointError
from facetrain.run.outputs import RunOutputs
from facetrain.telemetry.log import logger
from facetrain.training.state import TrainState

_GOES_ON = "; training continues"


@dataclass
class Checkpointing:
    """Begins checkpoints, commits them when all ranks have written them, and reports failures.

    A checkpoint that cannot be written does not end the run: training continues, with a warning, and the metric
    `save_failed` is recorded. Only the last checkpoint of a run must succeed (`require_saved`).
    """

    writer: CheckpointWriter
    outputs: RunOutputs
    meta: dict[str, Any]
    """JSON that every checkpoint holds beside the tensors."""
    last_saved: int | None
    """Step of the newest checkpoint that is complete; None if there is none."""
    uploads: Uploads | None = None
    """Uploads to the mirror; None without one."""
    check_lock: Callable[[], None] = lambda: None
    """Raises an error if another process writes the run."""
    _failure: str = field(default="", init=False)

    def save(self, state: TrainState, *, ends: bool = False) -> None:
        """Begin to save a checkpoint, the last one if training `ends`, when the one in flight has ended. Collective."""
        self.check_lock()
        self.outputs.advance(state.step, "saving a checkpoint")
        # The outcome is of the save before, unless saves are synchronous.
        self._record(self.writer.save(state.snapshot(self.meta)), remark="" if ends else _GOES_ON)

    def poll(self, state: TrainState) -> None:
        """Commit the checkpoint in flight once every rank has written its part. Collective."""
        if self.uploads:
            self.uploads.poll()
        if self.writer.in_flight:
            self._record(self.writer.poll(), remark=_GOES_ON)
        elif not self.writer.is_prepared:
            # After the first step, because from then on every tensor exists that is ever saved.
            self.writer.prepare(state.snapshot({}))

    def finish(self) -> None:
        """Wait for the checkpoint in flight, commit it and begin its upload, and remove older ones. Collective."""
        self._record(self.writer.end_save(), remark="")
        self.writer.finish()

    def require_saved(self, state: TrainState) -> None:
        """Check that the checkpoint of the present step is complete. All ranks decide the same.

        Raises:
            CheckpointError: it could not be written.
        """
        if self.last_saved != state.step:
            next_step = f"`facetrain resume` continues from step {self.last_saved}"
            raise CheckpointError(
                f"the checkpoint of step {state.step} was not saved ({self._failure}); "
                + ("start the run again" if self.last_saved is None else next_step)
            )

    def _record(self, outcome: SaveOutcome | None, *, remark: str) -> None:
        if outcome is not None and outcome.failure:
            self._failure = outcome.failure
            self.outputs.warn(f"checkpoint of step {outcome.step} was not saved: {outcome.failure}{remark}")
            self.outputs.write(outcome.step, {"save_failed": 1.0})
        elif outcome is not None:
            self.last_saved = outcome.step
            logger.info("saved the checkpoint of step %d", outcome.step)
            if self.uploads:
                self.uploads.add(outcome)


class Stopping:
    """Lets the ranks agree, once per step, whether to stop."""

    def __init__(self, request: StopRequest, print_message: Callable[[str], None]) -> None:
        """Take the signal handler, and a function that shows the user a line."""
        self._request, self._print = request, print_message
        self.signal = 0
        """Signal that the ranks have agreed to stop for; 0 as long as there is none."""
        self._pending: Callable[[], int] | None = None

    def begin(self) -> None:
        """Send this rank's signal to the others; do not wait. Collective.

        A signal that arrives during the step is sent before the next one.
        """
        self._pending = self._request.ask()

    def agree(self, state: TrainState) -> bool:
        """Return whether all ranks save and stop, by what each of them knew at the last `begin`. Collective."""
        pending, self._pending = self._pending, None
        if pending is None or state.unverified:
            # A signal has interrupted the verification after `begin`: the run stops after this step.
            pending = self._request.ask()
        self.signal = pending()
        if self.signal:
            self._print(
                f"{signal.Signals(self.signal).name} received: saving step {state.step} and stopping, within "
                f"{grace_s()} s of the signal"
                + ("; `facetrain resume` will verify it" if state.unverified else "")
            )
        return self.signal != 0
