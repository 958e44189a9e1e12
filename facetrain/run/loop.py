"""Training loop: what happens in a run from the first verification to the last checkpoint, on one screen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from facetrain.config.schema import Config
from facetrain.data.loading.loader import Batch
from facetrain.run.callbacks.checkpointing import Checkpointing, Stopping
from facetrain.run.callbacks.evaluation import Evaluation
from facetrain.run.callbacks.live_report import LiveReport
from facetrain.run.callbacks.logging import Logging
from facetrain.training.profile import StepProfiler
from facetrain.training.state import TrainState
from facetrain.training.step import TrainStep


@dataclass(frozen=True)
class Callbacks:
    """Everything that happens between two steps. All ranks call the same methods after the same step."""

    logging: Logging
    evaluation: Evaluation
    checkpointing: Checkpointing
    stopping: Stopping
    profiler: StepProfiler | None = None
    page: LiveReport | None = None
    """On the leader only; no rank waits for another one in it."""


def due(step: int, every: int) -> bool:
    """Return whether something that happens every so many steps happens after this step."""
    # By the number of the step alone, so that all ranks, and a resumed run, do the same after the same step.
    return step % every == 0


def fit(
    state: TrainState,
    batches: Iterable[tuple[Batch, ...]],
    step: TrainStep,
    callbacks: Callbacks,
    config: Config,
    *,
    total_steps: int,
) -> None:
    """Train until the batches end or the ranks agree to stop. Collective.

    `batches` yields the micro-batches of each step and begins at `state.step`. After the last step of the run,
    `total_steps`, a report, a verification and a checkpoint are due. A verification may make a step the last one
    (`train.stop_early`).
    """
    log, evaluation = callbacks.logging, callbacks.evaluation
    checkpoints, stopping = callbacks.checkpointing, callbacks.stopping

    if _ends_before_a_step(state, callbacks, config):
        return

    state.meter.restart_clock()  # what came before is no training
    # The loader has read and decoded these images ahead, in other processes, and copied them to the device.
    for micro_batches in batches:
        if callbacks.profiler:
            callbacks.profiler.begin_step()
        log.announce_stage(state)

        # Signals differ between ranks, and all ranks must take the same branches below. The ranks exchange them during
        # the step: with many ranks a reduction over gloo takes milliseconds.
        stopping.begin()

        # On a GPU, this returns when all kernels are queued: from here on the host runs ahead of the device.
        step(state, micro_batches)
        state.step += 1  # the number of finished steps; everything below reports, verifies and saves under it
        log.advance(state)
        is_last = state.step == total_steps

        # First of all, because a report or a check raises if the loss or the data has become too bad to continue: such
        # a state must be neither verified nor saved. Before these two the host waits for the device; otherwise it
        # reports a step while the device computes the next one.
        verifies = is_last or due(state.step, config.eval.every_steps)
        saves = is_last or due(state.step, config.checkpoint.every_steps)
        log.finish(state, micro_batches)
        if is_last or due(state.step, config.log.every_steps):
            log.report(state, micro_batches, at_once=verifies or saves)
        elif verifies or saves:
            log.check(state, micro_batches)

        # Before the save, so that a checkpoint has the metrics of its own weights: they choose the best checkpoint.
        if verifies:
            evaluation.verify(state)
            is_last = is_last or bool(state.early_stop.reason(config.train.stop_early))
        # Here and not after the first verification, so that the first step does not wait for it.
        evaluation.write_pairs(state)
        if callbacks.page:
            callbacks.page.update(state)

        # The answer to `begin`: it has arrived during the step, and every rank gets the same one.
        stops = stopping.agree(state)
        if stops:
            log.check(state, micro_batches)
        if is_last or stops or saves:
            checkpoints.save(state, ends=is_last or stops)
        else:
            # A thread writes a checkpoint for many steps; once all ranks are done, one of these calls commits it.
            checkpoints.poll(state)
        if stops or is_last:
            return


def _ends_before_a_step(state: TrainState, callbacks: Callbacks, config: Config) -> bool:
    """Verify the network that has not been verified; return whether the run takes no step. Collective."""
    # Verify the initial network: a verification set that cannot be used ends the run now and not after hours.
    # A resumed run was verified already, unless a signal interrupted that verification.
    if not state.resumed or state.unverified:
        callbacks.evaluation.verify(state)
        if state.unverified:  # a signal interrupted this one
            stops = callbacks.stopping.agree(state)
            callbacks.checkpointing.save(state, ends=stops)
            if stops:
                return True
        elif state.resumed:
            # Save that the verification is done: a further resume from this step must not repeat it.
            callbacks.evaluation.write_pairs(state)
            callbacks.checkpointing.save(state)
    return bool(state.early_stop.reason(config.train.stop_early))  # resumed after its end
