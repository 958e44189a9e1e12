"""A training run from its request to its end: the leader resolves it, all ranks agree, build and train."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

from facetrain.distributed.agreement import explain_failures, only_leader_reports
from facetrain.distributed.grace_period import grace_s
from facetrain.distributed.world import ARRIVAL_S, assemble
from facetrain.errors import CheckpointError, DataError, DivergedError, RunError, SkippedError
from facetrain.remote.download import pinned
from facetrain.run.agree import agree
from facetrain.run.build import Parts, build
from facetrain.run.callbacks.live_report import LiveReport
from facetrain.run.choose import FitBatch, find_rate, with_fitting_batch, with_rate
from facetrain.run.finish import end_again, finish, keep_what_is_saved
from facetrain.run.folder.lease import Lease
from facetrain.run.folder.run_state import Start, train_recorded
from facetrain.run.loop import fit
from facetrain.run.lr_range_test import RangeTest
from facetrain.run.open_run import Run, open_run
from facetrain.run.parts.world import joined
from facetrain.run.request import TrainRequest
from facetrain.telemetry.sink import CLOSE_S


def train(
    request: TrainRequest,
    *,
    pin: Callable[[str], str] = pinned,
    fit_batch: FitBatch | None = None,
    on_met: Callable[[], None] = lambda: None,
    on_folder: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Train the run that rank 0 is asked for; return the exit code. All ranks call it together.

    Args:
        request: what the command of this rank asks. On other ranks than 0 it is only compared.
        pin: downloads an address, or a name of the catalog; returns the address with its version.
        fit_batch: chooses the batch, for a request that leaves it to a measurement.
        on_met: called when the ranks have met, before there is a run folder. Until then the default action of a signal
            must end a rank: it waits in C++, where no handler of Python runs.
        on_folder: called with the folder of the run.

    Raises:
        UsageError: the request cannot be met, or the hosts differ.
        RunError: the run has failed.
    """
    began_at = time.perf_counter()
    grace_s()  # a wrong environment variable must be refused before there is a run folder
    with (
        assemble() as ranks,
        explain_failures(ranks, ARRIVAL_S),
        ranks.leaving_together(),
        Lease() as lease,
        ExitStack() as opened,
    ):
        on_met()
        agreed, tests = agree(ranks, request, lease, pin), []
        on_folder(agreed.folder)
        with (
            joined(agreed.config, ranks) as world,
            explain_failures(ranks, agreed.config.train.timeout_s),
        ):
            # What is left to a measurement changes the request, which is then resolved again.
            while choices := agreed.plan.open_choices:
                if "batch" in choices:
                    assert fit_batch is not None, "the caller of such a request gives it"
                    request = with_fitting_batch(request, agreed, world, fit_batch)
                else:
                    tests.append(find_rate(agreed, world))
                    request = with_rate(request, agreed.config, tests[-1])
                agreed = agree(ranks, request, lease, pin)
            if agreed.plan.is_over:
                return end_again(agreed, world)
            parts = build(agreed, world, lease.require_lock, began_at)
            opened.callback(parts.close)
            if world.is_leader:
                if not parts.plan.resumes:
                    RangeTest.remove(parts.folder)
                for test in tests:
                    test.write(parts.folder)
            exit_code = _train(parts)
            if parts.sinks and not exit_code:
                # When the ranks have left their group: no other one waits for the sinks of the leader.
                opened.callback(parts.sinks.close, CLOSE_S)
            return exit_code


def _train(parts: Parts) -> int:
    """Train a run whose parts are built, with its state in the run folder; return the exit code."""
    folder = parts.folder
    page = LiveReport(folder) if parts.is_leader and parts.config.log.report else None
    try:
        # One file for all ranks: `facetrain runs` reads it, and only the leader writes it.
        if not parts.is_leader:
            return _train_and_finish(parts, page)
        start = Start(step=parts.state.step, ranks=parts.world.size, device=parts.world.device.type)
        return train_recorded(
            folder,
            start,
            parts.schedule.total_steps,
            lambda: _train_and_finish(parts, page),
            lambda: parts.early_end,
            continues=parts.plan.resumes or parts.plan.restarted,
        )
    finally:
        if page:
            page.write()


def _train_and_finish(parts: Parts, page: LiveReport | None) -> int:
    run = open_run(parts, page)
    # From here on a signal does not end the process at once: the ranks agree on it after a step, and save.
    with run.stop_request:
        try:
            _train_to_end(run)
            return finish(run)
        except BaseException:
            # Here: the agent sends SIGTERM as soon as a rank is lost, which must not end the leader before it has sent
            # the last metrics.
            if parts.sinks:
                parts.sinks.close()
            raise


def _train_to_end(run: Run) -> None:
    """Train a run to its end or to a signal. Collective."""
    parts, callbacks = run.parts, run.callbacks
    try:
        with callbacks.profiler or nullcontext():
            last = parts.schedule.total_steps
            fit(run.state, run.loader, run.step, callbacks, parts.config, total_steps=last)
        # The last checkpoint is the run's result, or what a resume continues from: it must not fail in silence.
        callbacks.checkpointing.finish()
        if callbacks.stopping.signal or (parts.has_ended and run.state.step > (parts.plan.step or 0)):
            callbacks.checkpointing.require_saved(run.state)
    except (CheckpointError, DivergedError, SkippedError) as error:
        # Of all ranks. Another one may be of this rank alone, such as that of an augmentation which only it has drawn.
        keep_what_is_saved(run, error)
        raise only_leader_reports(parts.world, error) from error
    except Exception as error:
        if isinstance(error, DataError) and run.state.step:
            error.exit_code = RunError.exit_code  # as `Ranks.outages`, for an image that cannot be read
        if parts.world.size == 1:  # of several ranks, one fails alone, and nobody waits for the others' parts
            with suppress(Exception):  # it would hide the first one
                parts.check_lock()  # what another process writes now is left to it
                keep_what_is_saved(run, error)
        raise
    finally:
        run.close()
