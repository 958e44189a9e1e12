"""Learning rate range test (`--lr find`): a short training with a growing rate, which shows where the loss falls.

Smith, "Cyclical Learning Rates for Training Neural Networks" (arXiv 1506.01186), section 3.3. There the rate grows
linearly, and one reads off where the accuracy stops rising. Here it grows exponentially, because not even its order of
magnitude is known, and the loss is observed, because after a few steps an accuracy says nothing yet. With a hard margin
and many identities a few steps may not lower the loss at all; the rate of the config stays then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from facetrain.config.schema import Config
from facetrain.data.loading.staged_loader import StagedLoader
from facetrain.distributed import collectives
from facetrain.errors import ConfigError, RunError
from facetrain.files import os_errors_as, read_regular_text, write_atomically
from facetrain.run.suited_settings import HIGHEST_LR
from facetrain.telemetry.log import warn
from facetrain.training.state import TrainState
from facetrain.training.step import TrainStep

_FILE = "lr_range_test.json"
_MOST_STEPS, _FEWEST_STEPS = 100, 20
_LOWEST_SHARE = 1e-5
"""First rate, as a fraction of the last one, which cannot be meant (`HIGHEST_LR`)."""
_WINDOW = 9
"""Losses in a mean of the smoothed curve."""
_DEPTH = 0.5
"""Fraction of the fall of the loss below which a rate belongs to the valley. The first part of the fall, at rates that
are far too low, only makes the embeddings more alike; in the valley the loss is flat and noisy."""
_SHARE = 1 / 3
"""Largest fraction of the rate with the smallest loss. Beyond that rate the loss rises after a few steps; a run has to
be stable for all its steps."""
_LEAST_FALL = 0.02
"""Fraction of the first loss by which the loss must fall."""
_LEAST_NOISE = 2
"""Standard deviations of the loss of a step by which the smoothed loss must fall: chance alone gives 0.8 ± 0.3, because
the lowest of many means counts."""


class RangeTest(BaseModel, frozen=True, ser_json_inf_nan="constants"):
    """Learning rate and loss of each step of a range test, and the rate that follows from them."""

    rates: list[float]
    losses: list[float]
    lr: float
    """The rate that was found, or the one of the config."""
    found: bool = True

    def write(self, folder: Path) -> None:
        """Write the test to the run folder."""
        with os_errors_as(RunError, folder):
            write_atomically(folder / _FILE, self.model_dump_json() + "\n")

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove the test of a run that failed before its first checkpoint: the new run would seem to have made it."""
        with os_errors_as(RunError, folder):
            (folder / _FILE).unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path) -> RangeTest | None:
        """Return the test of a run; None if there is none that can be read."""
        try:
            return cls.model_validate_json(read_regular_text(folder / _FILE))
        except (OSError, ValueError):
            return None

    def describe(self) -> str:
        """Return what was chosen and why, in one line."""
        # A loss that is not finite ends the test early.
        last = self.rates[len(self.losses) - 1]
        tested = f"{len(self.losses)} steps with rates from {self.rates[0]:.2g} to {last:.2g}"
        if not self.found:
            return f"--lr find: optim.lr stays {self.lr:.3g}: the loss fell at no rate in {tested}"
        return f"--lr find: optim.lr {self.lr:.3g}, from the rates that lowered the loss in {tested}"


def require_steps_of_test(steps: int) -> None:
    """Check that the first stage of a run has enough steps for a range test, before anything is built for it.

    Raises:
        ConfigError: it has fewer.
    """
    if steps < _FEWEST_STEPS:
        raise ConfigError(
            f"--lr find: a range test needs {_FEWEST_STEPS} steps with the same batch, and the run (its first stage) "
            f"has {steps}; give --lr a number"
        )


def run_range_test(
    config: Config, state: TrainState, step: TrainStep, loader: StagedLoader, *, steps: int, lr_factor: float
) -> RangeTest:
    """Train a state with growing rates, and return the losses and the rate to use. Collective. The state is spoiled.

    Args:
        config: config of the run.
        state: state of a run before its first step.
        step: its training step.
        loader: its batches.
        steps: steps that the first stage of the run has; the test takes at most 100 of them.
        lr_factor: factor of the first stage on the rate.

    Raises:
        ConfigError: the loss was not finite from the beginning. All ranks raise it.
    """
    steps = min(steps, _MOST_STEPS)
    highest = HIGHEST_LR[config.optim.name]
    rates = np.geomspace(_LOWEST_SHARE * highest, highest, steps).tolist()
    losses: list[float] = []
    state.stepper.schedule = lambda number: lr_factor * rates[number]
    for _, batches in zip(rates, loader, strict=False):
        step(state, batches)
        state.step += 1
        # Of the leader: all ranks must choose the same rate, to the last bit.
        losses.append(collectives.broadcast_json(_loss(config, state.meter.report())))
        if not math.isfinite(losses[-1]):
            break
    found = choose_rate(rates, losses)
    if found is None and collectives.rank() == 0:
        warn(
            f"--lr find: in {len(losses)} steps the loss fell at no learning rate; optim.lr stays {config.optim.lr:g}. "
            "A hard margin or many identities need more steps than a test has; that is no fault of the data"
        )
    return RangeTest(rates=rates, losses=losses, lr=found or config.optim.lr, found=found is not None)


def choose_rate(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the geometric middle of the rates with half of the fall of the smoothed loss; None without a fall.

    It is at most a third of the rate with the smallest smoothed loss. `losses` belong to the first of the `rates`; only
    the last one may be infinite or NaN.

    Raises:
        ConfigError: the loss was not finite from the beginning.
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < _FEWEST_STEPS:
        raise ConfigError(
            f"--lr find: the loss was not finite at a learning rate of {rates[len(finite)]:.2g}, in step "
            f"{len(finite) + 1}; set train.precision to fp32 if it is not, check the images with `facetrain data "
            "check`, or give --lr a number"
        )
    # Centered, so that the smallest value stays at its rate; the first and last rates have no mean.
    smoothed = np.convolve(finite, np.full(_WINDOW, 1 / _WINDOW), "valid")
    tested = rates[_WINDOW // 2 :]
    lowest = int(smoothed.argmin())
    fall = smoothed[0] - smoothed[lowest]
    # The standard deviation of a step's loss, from the differences of neighbors: the curve hardly changes between them.
    noise = 1.4826 * float(np.median(np.abs(np.diff(finite)))) / math.sqrt(2)
    if fall < max(_LEAST_FALL * smoothed[0], _LEAST_NOISE * noise):
        return None
    valley = np.flatnonzero(smoothed <= smoothed[0] - _DEPTH * fall)
    middle = math.sqrt(tested[valley[0]] * tested[valley[-1]])
    return min(middle, _SHARE * tested[lowest])


def _loss(config: Config, values: dict[str, float]) -> float:
    if config.distill is None:
        return values["loss"]
    return config.distill.margin_weight * values["loss"] + config.distill.weight * values["distill_loss"]
