"""What a run trains with: its outputs, its loader, its step, and the callbacks of the loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from facetrain.checkpoint.commit import CHECKPOINTS
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.config.loading import dump_config
from facetrain.data.loading.staged_loader import StagedLoader
from facetrain.distributed.stop_request import StopRequest
from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.files import error_reason, sync_folder, write_atomically
from facetrain.run.build import Run
from facetrain.run.callbacks.checkpointing import Checkpointing, Stopping
from facetrain.run.callbacks.evaluation import Evaluation
from facetrain.run.callbacks.live_report import LiveReport, write_first_batch
from facetrain.run.callbacks.logging import Logging
from facetrain.run.loop import Callbacks
from facetrain.run.opening import report_start
from facetrain.run.outputs import PAIRS_FILE, RunOutputs, open_outputs
from facetrain.run.parts.learning_check import build_learning_check
from facetrain.run.parts.loader import build_augment, build_loader
from facetrain.run.summary import model_metadata
from facetrain.run.uploading import open_uploads, saved_checkpoint
from facetrain.telemetry.log import warn
from facetrain.training.profile import Profile, StepProfiler
from facetrain.training.step import TrainStep
from facetrain.verify.verifier import Verifier


@dataclass
class Session:
    """Parts of a run that live while it trains."""

    outputs: RunOutputs
    loader: StagedLoader
    step: TrainStep
    callbacks: Callbacks
    first_step: int

    def close(self) -> None:
        """End the reading processes, which would otherwise wait for requests, and close the outputs."""
        self.loader.close()
        self.outputs.close()


def open_session(run: Run, stop_request: StopRequest, page: LiveReport | None) -> Session:
    """Open what a run trains with. The leader keeps `page` up to date. Collective."""
    config, state, schedule, first_step = run.config, run.state, run.schedule, run.state.step
    outputs = RunOutputs()
    if run.is_leader:
        resume_at = first_step if run.plan.resumes else None
        outputs = open_outputs(config, run.folder, total_steps=schedule.total_steps, resume_at=resume_at)
        report_start(run, outputs)
    # The loader first: its processes read the first images while the rest is built and the network is verified.
    loader = build_loader(config, run.world, run.source, schedule, workers=run.workers, start_step=first_step)
    step = TrainStep(
        run.network,
        build_augment(config),
        on_first_images=partial(write_first_batch, run.folder) if run.is_leader else None,
    )
    callbacks = Callbacks(
        Logging(
            outputs,
            step,
            loader,
            schedule,
            max_skipped_images=config.data.max_skipped,
            check_lock=run.check_lock,
            learning_check=build_learning_check(config, state, schedule),
        ),
        _evaluation(run, outputs, stop_request),
        _checkpointing(run, outputs, loader),
        Stopping(stop_request, outputs.report),
        _profiler(run, outputs) if run.plan.profile else None,
        page,
    )
    return Session(outputs, loader, step, callbacks, first_step)


def _evaluation(run: Run, outputs: RunOutputs, stop_request: StopRequest) -> Evaluation:
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
        pairs_file=run.folder / PAIRS_FILE if run.is_leader else None,
    )


def _checkpointing(run: Run, outputs: RunOutputs, loader: StagedLoader) -> Checkpointing:
    config, step = run.config, run.state.step

    def sync_run() -> None:
        # A checkpoint is complete once the outputs until its step are on the disk, too.
        run.log.sync()
        outputs.sync()
        if run.is_leader:
            sync_folder(run.folder)  # the names of these files, which are new in a new run

    uploads = None
    if run.mirror:
        uploads = open_uploads(config, run.folder, run.mirror, lambda: run.has_ended)
        if run.plan.resumes:  # its upload may have been interrupted
            uploads.add(saved_checkpoint(run.folder, step, run.world, run.hosts))
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
        "run_id": run.plan.run_id,
        **run.plan.inputs,
    }
    return Checkpointing(
        writer,
        outputs,
        meta,
        last_saved=step if run.plan.resumes else None,
        skipped=loader.skipped,
        check_lock=run.check_lock,
        uploads=uploads,
    )


def _profiler(run: Run, outputs: RunOutputs) -> StepProfiler:
    folder = run.folder / "profile"

    def write(profile: Profile) -> None:
        if not run.is_leader:
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
