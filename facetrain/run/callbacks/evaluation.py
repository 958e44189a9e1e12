"""Verification of the network while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from facetrain.distributed import collectives
from facetrain.distributed.stop_request import Stopped
from facetrain.files import error_reason
from facetrain.telemetry.log import warn
from facetrain.training.early_stop import EarlyStop
from facetrain.training.settings import StopEarlySettings
from facetrain.training.state import TrainState, averaged_buffers
from facetrain.verify.metrics.result import Result
from facetrain.verify.output.hardest_pairs import write_hardest_pairs
from facetrain.verify.verifier import Verifier


@dataclass
class Evaluation:
    """Scores the network on the verification sets, records the metrics and writes the hardest pairs."""

    verifier: Verifier
    write: Callable[[int, dict[str, float]], None]
    """Writes the metrics of a step."""
    stop_early: StopEarlySettings | None = None
    """When the run ends before its last step."""
    pairs_file: Path | None = None
    """File that gets the hardest pairs of the last verification; None on ranks that write none."""
    _unwritten: tuple[int, dict[str, Result]] | None = field(default=None, init=False)

    def verify(self, state: TrainState) -> None:
        """Score the network on every verification set. Collective.

        If a signal arrives in the meantime, all ranks leave the verification, and `state.unverified` is set, so
        that a resumed run repeats it: the grace period after a signal is short, and a checkpoint matters more.
        """
        try:
            # The batch norm statistics differ between ranks; all must score the same network. It runs in float32, as in
            # `facetrain eval`, whatever train.precision is: both then report the same numbers for the same weights.
            with averaged_buffers(state.backbone):
                results = dict(self.verifier(state.backbone))
        except Stopped:
            state.unverified = True
            return
        state.unverified = False
        # The leader alone has results; all ranks decide by its metrics when to stop.
        measured = collectives.broadcast_json(
            {
                f"{name}/{metric}": value
                for name, result in results.items()
                for metric, value in result.available_metrics.items()
            }
        )
        if measured:
            state.verified_step, state.metrics = state.step, measured
            self.write(state.step, state.metrics)
            # Written later by `write_pairs`: the first step must not wait for it.
            self._unwritten = state.step, results
        # Without it, there is nothing that counts if a resume sets it again.
        state.early_stop = (
            state.early_stop.after(state.step, state.metrics, self.stop_early)
            if self.stop_early
            else EarlyStop()
        )
        state.meter.restart_clock()  # images per second count training alone

    def write_pairs(self, state: TrainState) -> None:
        """Write the hardest pairs of the last verification, if they are not written yet."""
        verified, self._unwritten = self._unwritten, None
        if verified and self.pairs_file:
            began_at = time.perf_counter()
            try:
                write_hardest_pairs(self.pairs_file, *verified, self.verifier.sets)
            except OSError as error:
                warn(f"{self.pairs_file}: {error_reason(error)}; training continues")
            # Not by a restart of the clock: the report of this step may have begun.
            state.meter.exclude(time.perf_counter() - began_at)
