"""Batches of a run for the training loop, with what else happens while the loop takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from facetrain.data.loading.loader import Batch
from facetrain.data.loading.staged_loader import TrainLoader
from facetrain.files import error_reason, write_atomically
from facetrain.run.outputs import RunOutputs
from facetrain.run.prepare import PreparedRun
from facetrain.telemetry.log import warn
from facetrain.training.profile import RECORDED_STEPS, WARM_UP_STEPS, Profile, profiled


def run_batches(run: PreparedRun, loader: TrainLoader, outputs: RunOutputs) -> Iterable[tuple[Batch, ...]]:
    """Return the micro-batches of each step of a run.

    While they are consumed, the beginning of each stage is reported, and a profile is recorded, each if the run asks
    for it.
    """
    batches: Iterable[tuple[Batch, ...]] = loader
    if len(run.schedule.stages) > 1:
        batches = _reported_stages(run, batches, outputs)
    return _profiled_steps(run, batches, outputs) if run.profile else batches


def _reported_stages(
    run: PreparedRun, batches: Iterable[tuple[Batch, ...]], outputs: RunOutputs
) -> Iterator[tuple[Batch, ...]]:
    """Yield the batches, and report the beginning of each stage."""
    first_steps = {stage.first_step: stage for stage in run.schedule.stages}
    for micro_batches in batches:
        stage = first_steps.get(micro_batches[0].step)
        if stage is not None:
            number = run.schedule.stages.index(stage) + 1
            outputs.report(
                f"stage {number} of {len(run.schedule.stages)}, from step {stage.first_step:,} (epoch "
                f"{stage.first_epoch}) to step {stage.stop_step:,}: {stage.describe()}"
            )
        yield micro_batches


def _profiled_steps(
    run: PreparedRun, batches: Iterable[tuple[Batch, ...]], outputs: RunOutputs
) -> Iterator[tuple[Batch, ...]]:
    """Yield the batches, and write a profile of a few steps to the run folder."""
    folder, is_recorded = run.folder / "profile", False

    def write(profile: Profile) -> None:
        nonlocal is_recorded
        is_recorded = True
        if run.world.is_leader:
            summary = profile.format_summary()
            write_atomically(folder / "summary.txt", summary + "\n")
            for line in summary.splitlines():
                outputs.print(line)
            outputs.print(
                f"profile written to {folder}; open it in ui.perfetto.dev or with tensorboard --logdir {folder}"
            )

    def report_failure(error: OSError) -> None:
        nonlocal is_recorded
        is_recorded = True
        warn(f"{folder}: the profile cannot be written: {error_reason(error)}; training continues")

    name = f"rank_{run.world.rank:05d}_from_{run.state.step:08d}.pt.trace.json.gz"
    yield from profiled(batches, folder / name, run.world.device, write, on_failure=report_failure)
    if not is_recorded:
        outputs.print(f"nothing was profiled: that takes {WARM_UP_STEPS + RECORDED_STEPS + 1} steps")
