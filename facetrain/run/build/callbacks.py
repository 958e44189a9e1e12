"""Construction of the callbacks of a run's training loop, and of the intervals between their calls."""

from __future__ import annotations

from facetrain.checkpoint.save import CheckpointWriter
from facetrain.config.loading import dump_config
from facetrain.data.loading.staged_loader import TrainLoader
from facetrain.distributed.stop_request import StopRequest
from facetrain.files import sync_folder
from facetrain.run.build.parts import build_learning_check
from facetrain.run.callbacks.checkpointing import Checkpointing
from facetrain.run.callbacks.evaluation import Evaluation
from facetrain.run.callbacks.logging import Logging
from facetrain.run.outputs import RunOutputs, described_model
from facetrain.run.prepare import PreparedRun
from facetrain.training.loop import Intervals
from facetrain.training.step import TrainStep
from facetrain.verify.verifier import Verifier


def build_intervals(run: PreparedRun) -> Intervals:
    """Return the number of steps between two calls of each callback."""
    return Intervals(
        log=run.config.log.every_steps,
        verify=run.config.eval.every_steps,
        save=run.config.checkpoint.every_steps,
        total_steps=run.schedule.total_steps,
    )


def build_logging(run: PreparedRun, outputs: RunOutputs, step: TrainStep, loader: TrainLoader) -> Logging:
    """Build the reports of what `step` and `loader` have done."""
    return Logging(
        outputs.recorder,
        outputs.spike_recorder,
        step,
        loader,
        outputs.print,
        images_after=run.schedule.images_after,
        max_skipped_images=run.config.data.max_skipped,
        check_lock=run.check_lock,
        learning_check=build_learning_check(run.config, run.state, run.schedule),
    )


def build_evaluation(run: PreparedRun, outputs: RunOutputs, stop_request: StopRequest) -> Evaluation:
    """Build the verification, which a stop request interrupts."""
    verifier = Verifier(
        run.sets,
        image_size=run.config.data.image_size,
        batch_size=run.config.eval.batch_size,
        device=run.world.device,
        workers=run.workers,
        check_stop=stop_request.raise_if_requested,
    )
    return Evaluation(verifier, outputs.recorder, best_metric=run.config.checkpoint.best_metric)


def build_checkpointing(run: PreparedRun, outputs: RunOutputs, loader: TrainLoader) -> Checkpointing:
    """Build the saving of checkpoints; each is complete once the outputs until then are on the disk, too."""
    config = run.config

    def sync_run() -> None:
        run.log.sync()
        outputs.sync()
        if run.world.is_leader:
            sync_folder(run.folder)  # the names of these files, which are new in a new run

    writer = CheckpointWriter(
        run.folder / "checkpoints",
        keep=config.checkpoint.keep,
        asynchronous=config.checkpoint.asynchronous,
        best_metric=config.checkpoint.best_metric,
        sync_run=sync_run,
    )
    meta = {
        "model": described_model(run),
        "config": dump_config(config),
        "schedule": {"global_batch_size": run.schedule.global_batch_size},
        "run_id": run.run_id,
        "dataset": run.digests.labels,
        "landmarks": run.digests.landmarks,
        "mixture": run.digests.mixture,
    }
    return Checkpointing(
        writer,
        outputs.recorder,
        meta,
        outputs.print,
        last_saved=run.state.step if run.resumed else None,
        every_minutes=config.checkpoint.every_minutes,
        skipped=loader.skipped,
        check_lock=run.check_lock,
    )
