"""Endings of a run: what is kept of a failed one, the results, the uploads."""

from __future__ import annotations

from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.uploads import Uploads
from facetrain.config.own_code import allow_option
from facetrain.distributed.agreement import fail_together
from facetrain.distributed.grace_period import grace_s
from facetrain.distributed.process_lifetime import outside_launcher
from facetrain.distributed.stop_request import StopRequest
from facetrain.distributed.world import World
from facetrain.errors import DivergedError, RunError
from facetrain.remote.address import public
from facetrain.run.agree import Agreed
from facetrain.run.callbacks.live_report import LiveReport
from facetrain.run.folder.run_state import FAILED, FINISHED, STOPPED, read_state, record_end
from facetrain.run.open_run import Run
from facetrain.run.results import write_divergence, write_results, write_skipped_images
from facetrain.run.summary import more_steps, print_lines
from facetrain.run.uploading import leave_uploads, open_uploads, upload_rest, uploads_rest
from facetrain.text import shell_path
from facetrain.training.early_stop import EarlyStop
from facetrain.training.profile import RECORDED_STEPS, WARM_UP_STEPS
from facetrain.training.state import averaged_state

_AFTER_TRAINING = ("run.name", "run.dir", "checkpoint.mirror", "log.report")
"""Config keys that still count when a run is finished: of its folder, of the uploads and of the page."""


def end_again(agreed: Agreed, world: World) -> int:
    """Say that a run was finished before, and upload what its mirror lacks; return the exit code. Collective."""
    plan, config, folder, checkpoint = agreed.plan, agreed.config, agreed.folder, agreed.checkpoint
    assert checkpoint is not None, "a run that is over has one"
    early_stop = EarlyStop.of(checkpoint.meta).reason(config.train.stop_early)
    early = early_stop if checkpoint.step < agreed.schedule.total_steps else ""
    if world.is_leader:
        for line in plan.chosen:
            print(line, flush=True)
        for change in plan.changes:
            # A part has new paths if the folder of its command was moved; what a user sets for it is refused.
            if change.key not in _AFTER_TRAINING and not plan.request.is_part:
                print_lines(f"{change}: has no effect, because the run was already finished")
        limit = config.train.max_steps
        options = more_steps(agreed.schedule, checkpoint.step, early_stop, max_steps=limit) + allow_option(
            config
        )
        command = f"facetrain resume {shell_path(folder)} {options}"
        more = "" if plan.request.is_part else f"; to train on: {command}"
        reason = f" ({early})" if early else ""
        print_lines(f"{folder}: was already finished, at step {checkpoint.step:,}{reason}{more}")
    if world.is_leader and read_state(folder).state != FINISHED:
        record_end(folder, FINISHED, early)  # before the upload, which takes the file along
        if config.log.report:
            LiveReport(folder).write()
    try:
        return _code(_upload_again(agreed, checkpoint, world))
    except RunError as error:
        if world.is_leader:
            record_end(folder, FAILED, public(str(error)))
        raise


def _upload_again(agreed: Agreed, checkpoint: Checkpoint, world: World) -> int:
    """Upload what the mirror lacks; return the signal that ends the wait, or 0. Collective."""
    mirror = agreed.mirror
    if mirror is None:
        return 0
    uploads = open_uploads(agreed, mirror, lambda: True)
    with StopRequest() as stop_request:
        return upload_rest(agreed, checkpoint.step, uploads, stop_request, world)


def keep_what_is_saved(run: Run, error: Exception) -> None:
    """Keep what can be kept of a run that fails on all ranks together."""
    # They can still commit the checkpoint in flight: it is from before.
    checkpointing = run.callbacks.checkpointing
    checkpointing.finish()
    if checkpointing.uploads:
        checkpointing.uploads.finish(grace_s() / 2)
    write_skipped_images(run.parts, run.loader)
    if isinstance(error, DivergedError) and run.parts.is_leader:
        write_divergence(run.parts, error)


def finish(run: Run) -> int:
    """Write the results of a run that was not stopped, and wait for the uploads; return the exit code. Collective."""
    parts, callbacks, outputs = run.parts, run.callbacks, run.outputs
    if callbacks.profiler is not None and not callbacks.profiler.is_over:
        outputs.print(f"nothing was profiled: that takes {WARM_UP_STEPS + RECORDED_STEPS + 1} steps")
    skipped, uploads = write_skipped_images(parts, run.loader), callbacks.checkpointing.uploads
    if callbacks.stopping.signal:
        ending = "; the traceback that torchrun prints now is no failure" if outside_launcher() else ""
        command = f"facetrain resume {shell_path(parts.folder)}{allow_option(parts.config)}"
        saved = "its last checkpoint is of" if parts.plan.request.is_part else f"`{command}` continues from"
        outputs.report(
            f"stopped at step {run.state.step}; {saved} step {callbacks.checkpointing.last_saved}{ending}"
        )
        if uploads:
            if parts.is_leader:
                record_end(parts.folder, STOPPED)  # now, so that the mirror gets it
            leave_uploads(parts, uploads, parts.world)
        return _code(callbacks.stopping.signal)
    weights = averaged_state(run.state.backbone)
    with fail_together(parts.world):
        if parts.is_leader:
            write_results(parts, weights, skipped, has_learned=callbacks.logging.has_learned)
    return _code(_upload_results(run, uploads)) if uploads else 0


def _upload_results(run: Run, uploads: Uploads) -> int:
    """Upload the results, after which a user can lose the copy only; return the signal that ends the wait, or 0."""
    parts, page = run.parts, run.callbacks.page
    if parts.is_leader:
        # Now, and not when the command ends: the mirror gets both with the checkpoint.
        record_end(parts.folder, FINISHED, parts.early_end)
        if page:
            page.write()
    run.outputs.report(
        f"uploading the last checkpoint and the results; Ctrl-C leaves, and {uploads_rest(parts)}"
    )
    return upload_rest(parts, run.state.step, uploads, run.stop_request, parts.world)


def _code(ended_by: int) -> int:
    """Return the exit code of a command that a signal has ended, as a shell reports it; 0: none has."""
    return 128 + ended_by if ended_by else 0
