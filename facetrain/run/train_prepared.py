"""Training of a prepared run: its outputs, its loop and its results."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from torch import Tensor

from facetrain.checkpoint.commit import CHECKPOINTS, step_folder
from facetrain.checkpoint.manifest import read_manifest
from facetrain.checkpoint.save import CheckpointWriter, SaveOutcome
from facetrain.checkpoint.uploads import Uploads
from facetrain.config.loading import dump_config
from facetrain.data.loading.staged_loader import StagedLoader
from facetrain.distributed.agreement import fail_together, only_leader_reports
from facetrain.distributed.grace_period import grace_s
from facetrain.distributed.process_lifetime import outside_launcher
from facetrain.distributed.stop_request import Stopped, StopRequest
from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.errors import CheckpointError, ConfigError, DivergedError, SkippedError
from facetrain.files import error_reason, shell_path, sync_folder, write_atomically
from facetrain.run.callbacks.checkpointing import Checkpointing, Stopping
from facetrain.run.callbacks.evaluation import Evaluation
from facetrain.run.callbacks.live_report import LiveReport, write_first_batch
from facetrain.run.callbacks.logging import Logging
from facetrain.run.folder.lock import LOCK_FILE
from facetrain.run.loop import Callbacks, fit
from facetrain.run.opening import report_start
from facetrain.run.outputs import PAIRS_FILE, RunOutputs, open_outputs
from facetrain.run.parts.learning_check import build_learning_check
from facetrain.run.parts.loader import build_augment, build_loader
from facetrain.run.prepare import PreparedRun
from facetrain.run.results import model_metadata, write_divergence, write_results, write_skipped_images
from facetrain.telemetry.log import warn
from facetrain.training.profile import RECORDED_STEPS, WARM_UP_STEPS, Profile, StepProfiler
from facetrain.training.state import averaged_state
from facetrain.training.step import TrainStep
from facetrain.verify.verifier import Verifier


def train_prepared(run: PreparedRun, *, profile: bool = False, page: LiveReport | None = None) -> int:
    """Train a run to its end or to a signal, and write its results; return the exit code. Collective.

    `profile` records a few steps in the run folder. The leader keeps `page` up to date.
    """
    config, state, schedule, first_step = run.config, run.state, run.schedule, run.state.step
    outputs = RunOutputs()
    if run.world.is_leader:
        resume_at = first_step if run.resumed else None
        total_steps = schedule.total_steps
        outputs = open_outputs(config, run.folder, total_steps=total_steps, resume_at=resume_at)
        report_start(run, outputs)
    # The loader first: its processes read the first images while the rest is built and the network is verified.
    loader = build_loader(config, run.world, run.source, schedule, workers=run.workers, start_step=first_step)
    step = TrainStep(
        run.network,
        build_augment(config),
        max_skipped_steps=config.train.max_skipped_steps,
        on_first_images=partial(_use_first_images, run),
    )
    profiler = _build_profiler(run, outputs) if profile else None
    was_finished = run.resumed and _is_finished(run)
    # From here on a signal does not end the process at once: the ranks agree on it after a step, and save.
    with StopRequest() as stop_request:
        stopping = Stopping(stop_request, outputs.report)
        checkpointing = _build_checkpointing(run, outputs, loader)
        callbacks = Callbacks(
            _build_logging(run, outputs, step, loader),
            _build_evaluation(run, outputs, stop_request),
            checkpointing,
            stopping,
            profiler,
            page,
        )
        try:
            with profiler or nullcontext():
                fit(
                    state,
                    loader,
                    step,
                    callbacks,
                    config,
                    total_steps=schedule.total_steps,
                    resumed=run.resumed,
                )
            # The last checkpoint is the run's result, or what a resume continues from: it must not fail in silence.
            checkpointing.finish()
            if stopping.signal or (_is_finished(run) and state.step > first_step):
                checkpointing.require_saved(state)
        except (CheckpointError, ConfigError, DivergedError, SkippedError) as error:
            # All ranks raise these together, so they can still commit the checkpoint in flight: it is from before.
            checkpointing.finish()
            if checkpointing.uploads:
                checkpointing.uploads.finish(grace_s() / 2)
            write_skipped_images(run, loader)
            if isinstance(error, DivergedError) and run.world.is_leader:
                write_divergence(run, error)
            raise only_leader_reports(run.world, error) from error
        finally:
            loader.close()  # ends the reading processes, which would otherwise wait for requests
            outputs.close()
        if profiler is not None and not profiler.is_over:
            outputs.print(f"nothing was profiled: that takes {WARM_UP_STEPS + RECORDED_STEPS + 1} steps")
        skipped = write_skipped_images(run, loader)
        if stopping.signal:
            ending = "; the traceback that torchrun prints now is no failure" if outside_launcher() else ""
            outputs.report(
                f"stopped at step {state.step}; `facetrain resume {shell_path(run.folder)}` continues from step "
                f"{checkpointing.last_saved}{ending}"
            )
        else:
            has_learned = callbacks.logging.has_learned
            weights = averaged_state(state.backbone)
            with fail_together(run.world):
                if run.world.is_leader:
                    write_results(run, weights, skipped, has_learned=has_learned, was_finished=was_finished)
        ended_by = stopping.signal
        if checkpointing.uploads:
            # After the results: what a user can lose by leaving now is the copy only.
            ended_by = _finish_uploads(run, checkpointing.uploads, outputs, stop_request, ended_by)
    return 128 + ended_by if ended_by else 0  # as a shell reports a process that a signal has ended


def _finish_uploads(
    run: PreparedRun, uploads: Uploads, outputs: RunOutputs, request: StopRequest, ended_by: int
) -> int:
    """Upload what is left, and the results of a run that no signal has ended; return the signal, if any. Collective."""
    remedy = f"`facetrain resume {shell_path(run.folder)}` uploads the rest"
    try:
        if ended_by:
            # There is little time after a signal, and the local checkpoint is complete.
            failure = uploads.finish(grace_s() / 2)
        else:
            outputs.report(f"uploading the last checkpoint and the results; Ctrl-C leaves, and {remedy}")
            uploads.add(_saved(run))
            failure = uploads.finish(check_stop=request.raise_if_requested)
    except Stopped:
        ended_by = request.ask()()
        failure = f"{signal.Signals(ended_by).name} received"
    if failure and run.world.is_leader:
        warn(f"the newest checkpoint or its results are not in checkpoint.mirror: {failure}; {remedy}")
    return ended_by


def _files_to_upload(run: PreparedRun) -> list[Path]:
    """Return the files of the run folder that the mirror gets with a checkpoint; models only at the end of the run."""
    return [
        path
        for path in sorted(run.folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.name != LOCK_FILE
        and (path.suffix != ".safetensors" or _is_finished(run))
    ]


def _saved(run: PreparedRun) -> SaveOutcome:
    """Return the checkpoint of the present step, as a save whose files are those on this disk."""
    step = run.state.step
    if not run.hosts.is_owner:
        return SaveOutcome(step)
    folder = step_folder(run.folder / CHECKPOINTS, step)
    manifest = read_manifest(folder)
    files = tuple(entry for entry in manifest.files if (folder / entry.name).exists())
    return SaveOutcome(step, files=files, manifest=manifest if run.world.is_leader else None)


def _is_finished(run: PreparedRun) -> bool:
    """Return whether the run has taken its last step, or has stopped early."""
    stopped_early = run.state.early_stop.reason(run.config.train.stop_early)
    return run.state.step >= run.schedule.total_steps or bool(stopped_early)


def _use_first_images(run: PreparedRun, image_BCHW: Tensor) -> None:
    if run.world.is_leader:
        write_first_batch(run.folder, image_BCHW)


def _build_logging(run: PreparedRun, outputs: RunOutputs, step: TrainStep, loader: StagedLoader) -> Logging:
    return Logging(
        outputs,
        step,
        loader,
        run.schedule,
        max_skipped_images=run.config.data.max_skipped,
        check_lock=run.check_lock,
        learning_check=build_learning_check(run.config, run.state, run.schedule),
    )


def _build_evaluation(run: PreparedRun, outputs: RunOutputs, stop_request: StopRequest) -> Evaluation:
    verifier = Verifier(
        run.sets,
        partial(
            ImageEmbedder,
            image_size=run.config.data.image_size,
            batch_size=run.config.eval.batch_size,
            device=run.world.device,
            workers=run.workers,
            check_stop=stop_request.raise_if_requested,  # a signal interrupts the verification
        ),
        lambda name, done, total: outputs.advance(run.state.step, f"verifying {name}: {done / total:.0%}"),
    )
    return Evaluation(
        verifier,
        outputs.write,
        best_metric=run.config.checkpoint.best_metric,
        stop_early=run.config.train.stop_early,
        pairs_file=run.folder / PAIRS_FILE if run.world.is_leader else None,
    )


def _build_checkpointing(run: PreparedRun, outputs: RunOutputs, loader: StagedLoader) -> Checkpointing:
    config = run.config

    def sync_run() -> None:
        # A checkpoint is complete once the outputs until its step are on the disk, too.
        run.log.sync()
        outputs.sync()
        if run.world.is_leader:
            sync_folder(run.folder)  # the names of these files, which are new in a new run

    uploads = None
    if run.hosts.mirror:
        uploads = Uploads(
            run.hosts.mirror,
            run.folder / CHECKPOINTS,
            keep=config.checkpoint.keep,
            best_metric=config.checkpoint.best_metric,
            run_files=partial(_files_to_upload, run),
        )
        if run.resumed:  # its upload may have been interrupted
            uploads.add(_saved(run))
    writer = CheckpointWriter(
        run.folder / CHECKPOINTS,
        keep=config.checkpoint.keep,
        asynchronous=config.checkpoint.asynchronous,
        best_metric=config.checkpoint.best_metric,
        sync_run=sync_run,
        is_owner=run.hosts.is_owner,
        steps_in_use=lambda: uploads.steps_in_use if uploads else set(),
    )
    meta = {
        "model": model_metadata(config, run.folder),
        "config": dump_config(config),
        # For the warning of a resume with another number of ranks.
        "schedule": {"global_batch_size": run.schedule.global_batch_size},
        "run_id": run.identity.run_id,
        **run.identity.digests,
    }
    return Checkpointing(
        writer,
        outputs,
        meta,
        last_saved=run.state.step if run.resumed else None,
        skipped=loader.skipped,
        check_lock=run.check_lock,
        uploads=uploads,
    )


def _build_profiler(run: PreparedRun, outputs: RunOutputs) -> StepProfiler:
    folder = run.folder / "profile"

    def write(profile: Profile) -> None:
        if not run.world.is_leader:
            return
        summary = profile.format_summary()
        write_atomically(folder / "summary.txt", summary + "\n")
        for line in summary.splitlines():
            outputs.print(line)
        outputs.print(
            f"profile written to {folder}; open it in ui.perfetto.dev or with tensorboard --logdir {folder}"
        )

    def report_failure(error: OSError) -> None:
        warn(f"{folder}: the profile cannot be written: {error_reason(error)}; training continues")

    # Each rank writes its trace: what one waits for is seen in another's.
    name = f"rank_{run.world.rank:05d}_from_{run.state.step:08d}.pt.trace.json.gz"
    return StepProfiler(folder / name, run.world.device, write, on_failure=report_failure)
