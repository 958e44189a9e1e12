"""Verification of the network while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from facetrain.distributed import collectives
from facetrain.distributed.stop_request import Stopped
from facetrain.errors import ConfigError
from facetrain.files import error_reason
from facetrain.telemetry.log import warn
from facetrain.training.settings import StopEarlySettings
from facetrain.training.state import TrainState, averaged_buffers
from facetrain.verify.metrics.result import Result
from facetrain.verify.output.hardest_pairs import write_hardest_pairs
from facetrain.verify.verifier import Verifier

_LARGER_IS_BETTER = ("accuracy", "auc", "tar@")
"""Metrics of which a better model has larger values, or the beginnings of their names."""


@dataclass
class Evaluation:
    """Scores the network on the verification sets, records the metrics and writes the hardest pairs."""

    verifier: Verifier
    write: Callable[[int, dict[str, float]], None]
    """Writes the metrics of a step."""
    best_metric: str | None = None
    """Metric that chooses the best checkpoint (`checkpoint.best_metric`)."""
    stop_early: StopEarlySettings | None = None
    """When the run ends before its last step."""
    pairs_file: Path | None = None
    """File that gets the hardest pairs of the last verification; None on ranks that write none."""
    _unwritten: tuple[int, dict[str, Result]] | None = field(default=None, init=False)

    def verify(self, state: TrainState) -> None:
        """Score the network on every verification set. Collective.

        If a signal arrives in the meantime, all ranks leave the verification, and `state.unverified` is set, so
        that a resumed run repeats it: the grace period after a signal is short, and a checkpoint matters more.

        Raises:
            ConfigError: the verification before the first step does not measure a metric that the config names.
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
        if results:
            state.verified_step = state.step
            measured = {
                f"{name}/{metric}": value
                for name, result in results.items()
                for metric, value in result.available_metrics.items()
            }
            # The same on all ranks, which decide by them when to stop: CPUs of different kinds may round differently.
            state.metrics = collectives.broadcast_json(measured)
            self.write(state.step, state.metrics)
            # Written later by `write_pairs`: the first step must not wait for it.
            self._unwritten = state.step, results
        if state.step == 0:
            for key, metric in named_metrics(self.best_metric, self.stop_early).items():
                require_metric(key, metric, state.metrics)
        if self.stop_early:
            state.early_stop = state.early_stop.after(state.step, state.metrics, self.stop_early)
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


def named_metrics(best_metric: str | None, stop_early: StopEarlySettings | None) -> Mapping[str, str]:
    """Return the metrics that a config names, by key."""
    stop = stop_early.metric if stop_early else None
    keys = {"checkpoint.best_metric": best_metric, "train.stop_early.metric": stop}
    return {key: metric for key, metric in keys.items() if metric is not None}


def _is_larger_for_better(metric: str) -> bool:
    return metric.startswith(_LARGER_IS_BETTER) and metric != "accuracy_std"


def require_metric(key: str, metric: str, measured: Collection[str]) -> None:
    """Check that the verification measures the metric that a key of the config names, and that larger is better.

    Raises:
        ConfigError: it does not, or a better model does not have a larger value.
    """
    names = [name for name in measured if _is_larger_for_better(name.rpartition("/")[2])]
    if metric not in names:
        reason = "is no metric whose larger values are better" if metric in measured else "is not measured"
        known = ", ".join(names) or "no set: eval.targets is empty"
        raise ConfigError(f"{key}: {metric} {reason}; the verification measures {known}")
