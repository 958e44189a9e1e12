"""A run that is ready to train: its parts, with outputs, loader, step and the callbacks of the loop."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from facetrain.checkpoint.commit import CHECKPOINTS
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.config.loading import dump_config
from facetrain.data.loading.sampler import epoch_size
from facetrain.data.loading.staged_loader import StagedLoader
from facetrain.distributed.stop_request import StopRequest
from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.files import error_reason, sync_folder, write_atomically
from facetrain.models.model_file import CARDS_KEY, TRAINED_ON_KEY
from facetrain.optim.loss_scale import MOST_HALVINGS
from facetrain.run.batch_change import IMAGES_PER_EPOCH
from facetrain.run.build import Parts
from facetrain.run.callbacks.checkpointing import Checkpointing, Stopping
from facetrain.run.callbacks.evaluation import Evaluation
from facetrain.run.callbacks.live_report import LiveReport, write_first_batch
from facetrain.run.callbacks.logging import Logging
from facetrain.run.folder.run_files import PAIRS_FILE, PROFILE_FOLDER
from facetrain.run.loop import Callbacks
from facetrain.run.opening import report_start
from facetrain.run.outputs import RunOutputs, open_outputs
from facetrain.run.parts.learning_check import build_learning_check
from facetrain.run.parts.loader import build_loader, count_workers
from facetrain.run.results import model_metadata
from facetrain.run.uploading import open_uploads, saved_checkpoint
from facetrain.telemetry.log import warn
from facetrain.training.profile import Profile, StepProfiler
from facetrain.training.state import TrainState
from facetrain.training.step import MAX_SKIPPED_STEPS, TrainStep
from facetrain.verify.verifier import Verifier


@dataclass(frozen=True)
class Run:
    """A run that is ready to train. Its reading processes have started."""

    parts: Parts
    outputs: RunOutputs
    loader: StagedLoader
    step: TrainStep
    callbacks: Callbacks
    stop_request: StopRequest

    @property
    def state(self) -> TrainState:
        """State of the run."""
        return self.parts.state

    def close(self) -> None:
        """End the reading processes, which would otherwise wait for requests, and close the outputs but the sinks."""
        self.loader.close()
        self.outputs.close()


def open_run(parts: Parts, page: LiveReport | None) -> Run:
    """Open what the parts of a run need to train. The leader keeps `page` up to date. Collective."""
    config, state, schedule = parts.config, parts.state, parts.schedule
    outputs, stop_request = RunOutputs(), StopRequest()
    with ExitStack() as opened:  # closed here only if the rest fails
        if parts.is_leader:
            outputs = open_outputs(
                parts.folder, parts.sinks, total_steps=schedule.total_steps, resume_at=parts.plan.step
            )
            opened.callback(outputs.close)
            report_start(parts, outputs)
        # The loader first: its processes read the first images while the rest is built and the network is verified.
        loader = build_loader(config, parts.world, parts.data.source, schedule, start_step=state.step)
        opened.callback(loader.close)
        step = TrainStep(
            parts.network,
            parts.augment,
            seed=config.seed,
            max_skipped_steps=_most_skipped_steps(parts),
            on_first_images=partial(write_first_batch, parts.folder) if parts.is_leader else None,
        )
        logging = Logging(
            outputs,
            step,
            loader,
            schedule,
            max_skipped_images=config.data.max_skipped,
            check_lock=parts.check_lock,
            learning_check=build_learning_check(config, state, schedule),
        )
        callbacks = Callbacks(
            logging,
            _evaluation(parts, outputs, stop_request),
            _checkpointing(parts, outputs),
            Stopping(stop_request, outputs.report),
            _profiler(parts, outputs) if parts.plan.request.profile else None,
            page,
        )
        run = Run(parts, outputs, loader, step, callbacks, stop_request)
        opened.pop_all()
    return run


def _evaluation(parts: Parts, outputs: RunOutputs, stop_request: StopRequest) -> Evaluation:
    verifier = Verifier(
        parts.data.sets,
        partial(
            ImageEmbedder,
            image_size=parts.config.data.image_size,
            batch_size=parts.config.eval.batch_size,
            device=parts.world.device,
            workers=count_workers(parts.config, parts.world),
            check_stop=stop_request.raise_if_requested,  # a signal interrupts the verification
        ),
        lambda name, done, total: outputs.advance(parts.state.step, f"verifying {name}: {done / total:.0%}"),
    )
    return Evaluation(
        verifier,
        outputs.write,
        stop_early=parts.config.train.stop_early,
        pairs_file=parts.folder / PAIRS_FILE if parts.is_leader else None,
    )


def _checkpointing(parts: Parts, outputs: RunOutputs) -> Checkpointing:
    config = parts.config

    def sync_run() -> None:
        # A checkpoint is complete once the outputs until its step are on the disk, too.
        parts.log.sync()
        outputs.sync()
        if parts.is_leader:
            sync_folder(parts.folder)  # the names of these files, which are new in a new run

    uploads = None
    if mirror := parts.mirror:
        uploads = open_uploads(parts, mirror, lambda: parts.has_ended, has_claimed=parts.plan.resumes)
        if parts.plan.resumes:  # its upload may have been interrupted
            uploads.add(saved_checkpoint(parts, parts.state.step, is_leader=parts.is_leader))
    writer = CheckpointWriter(
        parts.folder / CHECKPOINTS,
        keep=config.checkpoint.keep,
        asynchronous=config.checkpoint.asynchronous,
        best_metric=config.checkpoint.best_metric,
        sync_run=sync_run,
        is_owner=parts.hosts.is_owner,
        steps_in_use=lambda: uploads.steps_in_use if uploads else set(),
    )
    meta = {
        "model": model_metadata(parts),
        "earlier": {key: parts.state.earlier.get(key) for key in (TRAINED_ON_KEY, CARDS_KEY)},
        "config": dump_config(config),
        "run_id": parts.plan.run_id,
        IMAGES_PER_EPOCH: epoch_size(parts.data.source),
        **parts.plan.inputs,
    }
    return Checkpointing(
        writer,
        outputs,
        meta,
        last_saved=parts.plan.step,
        check_lock=parts.check_lock,
        uploads=uploads,
    )


def _most_skipped_steps(parts: Parts) -> int:
    """Return how many steps in a row may be skipped before the run has diverged."""
    # In fp16, steps are skipped until the loss scale is found.
    most = MAX_SKIPPED_STEPS + (MOST_HALVINGS if parts.state.stepper.scale.enabled else 0)
    # A short run that skips all of its steps has trained nothing, also in several starts.
    has_trained = parts.state.step > parts.state.skips_in_a_row
    return most if has_trained else min(most, parts.schedule.total_steps)


def _profiler(parts: Parts, outputs: RunOutputs) -> StepProfiler:
    folder = parts.folder / PROFILE_FOLDER

    def write(profile: Profile) -> None:
        if not parts.is_leader:
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
    name = f"rank_{parts.world.rank:05d}_from_{parts.state.step:08d}.pt.trace.json.gz"
    return StepProfiler(folder / name, parts.world.device, write, on_failure=report_failure)
