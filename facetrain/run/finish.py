"""Training of a run that is built, and its endings: the last checkpoint, the results, the uploads."""

from __future__ import annotations

from contextlib import nullcontext

from facetrain.checkpoint.load import Checkpoint
from facetrain.distributed.agreement import fail_together, only_leader_reports
from facetrain.distributed.grace_period import grace_s
from facetrain.distributed.process_lifetime import outside_launcher
from facetrain.distributed.stop_request import StopRequest
from facetrain.distributed.world import World
from facetrain.errors import CheckpointError, ConfigError, DivergedError, FacetrainError, SkippedError
from facetrain.files import shell_path
from facetrain.run.agree import Agreed
from facetrain.run.build import Run
from facetrain.run.callbacks.live_report import LiveReport
from facetrain.run.folder.run_state import record_end
from facetrain.run.loop import fit
from facetrain.run.resolve import open_mirror
from facetrain.run.session import Session, open_session
from facetrain.run.summary import end_key, print_lines, write_divergence, write_results, write_skipped_images
from facetrain.run.uploading import (
    leave_uploads,
    open_uploads,
    remove_uploaded,
    saved_checkpoint,
    upload_rest,
    uploads_rest,
)
from facetrain.training.early_stop import EarlyStop
from facetrain.training.profile import RECORDED_STEPS, WARM_UP_STEPS
from facetrain.training.state import averaged_state


def train_to_end(run: Run, page: LiveReport | None = None) -> int:
    """Train a run to its end or to a signal, and write its results; return the exit code. Collective."""
    stop_request = StopRequest()
    session = open_session(run, stop_request, page)
    callbacks = session.callbacks
    # From here on a signal does not end the process at once: the ranks agree on it after a step, and save.
    with stop_request:
        try:
            with callbacks.profiler or nullcontext():
                fit(
                    run.state,
                    session.loader,
                    session.step,
                    callbacks,
                    run.config,
                    total_steps=run.schedule.total_steps,
                )
            # The last checkpoint is the run's result, or what a resume continues from: it must not fail in silence.
            callbacks.checkpointing.finish()
            if callbacks.stopping.signal or (run.has_ended and run.state.step > session.first_step):
                callbacks.checkpointing.require_saved(run.state)
        except (CheckpointError, ConfigError, DivergedError, SkippedError) as error:
            _keep_what_is_saved(run, session, error)
            raise only_leader_reports(run.world, error) from error
        finally:
            session.close()
        ended_by = _finish(run, session, stop_request)
    return 128 + ended_by if ended_by else 0  # as a shell reports a process that a signal has ended


def end_again(agreed: Agreed, world: World) -> int:
    """Say that a run was finished before, and upload what its mirror lacks; return the exit code. Collective."""
    plan, config, folder, checkpoint = agreed.plan, agreed.config, agreed.folder, agreed.checkpoint
    assert checkpoint is not None, "a run that is over has one"
    early = EarlyStop.of(checkpoint.meta).reason(config.train.stop_early)
    if world.is_leader:
        for line in plan.chosen:
            print(line, flush=True)
        more = f"facetrain resume {shell_path(folder)} --set {end_key(config, agreed.schedule, early)}=MORE"
        reason = f" ({early})" if early else ""
        print_lines(
            f"{folder}: was already finished, at step {checkpoint.step:,}{reason}; to train on: {more}"
        )
    return 128 + ended_by if (ended_by := _upload_again(agreed, checkpoint, world)) else 0


def _upload_again(agreed: Agreed, checkpoint: Checkpoint, world: World) -> int:
    mirror = open_mirror(agreed.config, agreed.folder)
    if mirror is None:
        return 0
    uploads = open_uploads(agreed.config, agreed.folder, mirror, lambda: True)
    last = saved_checkpoint(agreed.folder, checkpoint.step, world, agreed.hosts)
    with StopRequest() as stop_request:
        if ended_by := upload_rest(uploads, last, agreed.folder, stop_request, world):
            return ended_by
    if world.is_leader:
        record_end(agreed.folder)
    return 0


def _keep_what_is_saved(run: Run, session: Session, error: FacetrainError) -> None:
    """Keep what can be kept of a run that fails on all ranks together."""
    # They can still commit the checkpoint in flight: it is from before.
    checkpointing = session.callbacks.checkpointing
    checkpointing.finish()
    if checkpointing.uploads:
        checkpointing.uploads.finish(grace_s() / 2)
    write_skipped_images(run, session.loader)
    if isinstance(error, DivergedError) and run.is_leader:
        write_divergence(run, error)


def _finish(run: Run, session: Session, stop_request: StopRequest) -> int:
    """Write the results, and wait for the uploads; return the signal that has ended the run, or 0. Collective."""
    callbacks, outputs = session.callbacks, session.outputs
    if callbacks.profiler is not None and not callbacks.profiler.is_over:
        outputs.print(f"nothing was profiled: that takes {WARM_UP_STEPS + RECORDED_STEPS + 1} steps")
    skipped, uploads = write_skipped_images(run, session.loader), callbacks.checkpointing.uploads
    if callbacks.stopping.signal:
        ending = "; the traceback that torchrun prints now is no failure" if outside_launcher() else ""
        outputs.report(
            f"stopped at step {run.state.step}; `facetrain resume {shell_path(run.folder)}` continues from step "
            f"{callbacks.checkpointing.last_saved}{ending}"
        )
        if uploads:
            leave_uploads(uploads, run.folder, run.world)
        return callbacks.stopping.signal
    weights = averaged_state(run.state.backbone)
    with fail_together(run.world):
        if run.is_leader:
            write_results(run, weights, skipped, has_learned=callbacks.logging.has_learned)
    if uploads is None:
        return 0
    # After the results: what a user can lose by leaving now is the copy only.
    outputs.report(
        f"uploading the last checkpoint and the results; Ctrl-C leaves, and {uploads_rest(run.folder)}"
    )
    last = saved_checkpoint(run.folder, run.state.step, run.world, run.hosts)
    ended_by = upload_rest(uploads, last, run.folder, stop_request, run.world)
    if run.hosts.is_owner and not ended_by:
        remove_uploaded(run.config, run.folder)
    return ended_by
