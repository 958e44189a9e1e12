"""Checks before the first step: what cannot end well is refused now, and not after hours."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Set
from pathlib import Path

import torch

from facetrain.backbone.base import evaluation_mode
from facetrain.backbone.own_network import OwnNetwork
from facetrain.checkpoint.commit import CHECKPOINTS, complete_steps
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.data.label_problems import FEWEST_PEOPLE, label_remarks
from facetrain.data.mixture import MixtureDataset
from facetrain.data.remote_dataset import remarks_on_reading
from facetrain.data.tools.photo_shapes import describe_photos
from facetrain.distributed.world import World
from facetrain.errors import RunError, UsageError
from facetrain.files import error_reason
from facetrain.head.build import unused_keys
from facetrain.head.head_group import head_parts
from facetrain.optim.muon import hidden_weights
from facetrain.optim.settings import MuonSettings
from facetrain.run.folder.earlier import RENAME_CHECK
from facetrain.run.parts.head import margins_of_datasets
from facetrain.run.parts.step_schedule import StepSchedule
from facetrain.run.request import CHOSEN_KEYS
from facetrain.run.suited_settings import HIGHEST_LR, RunFacts, gather_facts, suited_rate, unsuited_settings
from facetrain.text import count_text
from facetrain.training.state import TrainState

_MOST_OF_MUON = 100
"""Factor on the default rate of Muon that cannot be meant."""


def check_start(
    config: Config,
    folder: Path,
    source: FaceDataset,
    state: TrainState,
    schedule: StepSchedule,
    measured: Set[str],
    *,
    raises_lr: bool,
) -> list[str]:
    """Check disk, data and learning rate before the first step; return the warnings. For the leader only.

    Args:
        config: config of the run.
        folder: run folder.
        source: training data.
        state: state of the run, as it will be saved.
        schedule: steps of the run.
        measured: config keys whose values a measurement has given (`--batch auto`, `--lr find`).
        raises_lr: whether the run continues with a higher learning rate; a lower one is what a later stage, or the
            advice for a run that has diverged, asks for.

    Raises:
        RunError: the disk cannot hold a checkpoint, or cannot rename a folder.
        UsageError: the run folder would be a person of the training data.
    """
    if not state.resumed:
        _require_no_identity(folder, source)
    facts = gather_facts(config, source, state.world.size)
    # A rate is settled that was measured, with which the run has begun, or that is reported by a check of its own.
    has_begun_so = state.resumed and not raises_lr
    is_settled = has_begun_so or config.optim.lr > HIGHEST_LR[config.optim.name]
    settled = measured | ({"optim.lr"} if is_settled else set())
    # Those of later steps are put aside, and stay.
    held = sum(step <= state.step for step in complete_steps(folder / CHECKPOINTS))
    warnings = [
        *label_remarks(source, config.data.train),
        *(f"{config.data.train}: {photos}" for photos in [describe_photos(source)] if photos),
        *remarks_on_reading(source, cache_bytes=config.data.cache_bytes, shuffle=config.data.shuffle),
        *_check_people(config, facts),
        *_check_cores(state.world),
        *_check_learning_rate(config, facts),
        *_check_schedule(config, schedule),
        # A run that continues may have measured its batch when it began.
        *_check_effects(config, scaled=state.resumed or not measured.isdisjoint(CHOSEN_KEYS["batch"])),
        *_check_mixture(config, source),
        *_check_suited(config, facts, settled),
        *_check_lengths(state),
        *check_free_space(
            config, folder, checkpoint_bytes(config, state), schedule.total_steps - state.step, held=held
        ),
    ]
    _require_renames(folder)
    return warnings


def checkpoint_bytes(config: Config, state: TrainState) -> int:
    """Return the size of a checkpoint: backbone and optimizer once, the class centers of all ranks."""
    weights = sum(tensor.nbytes for tensor in state.backbone.state_dict().values())
    trained = sum(weight.nbytes for weight in state.backbone.parameters() if weight.requires_grad)
    chosen = hidden_weights(state.backbone, state.backbone.last_layers())
    moments = config.optim.count_moments(
        trained, sum(weight.nbytes for weight in chosen if weight.requires_grad)
    )
    rows = 0.0
    for part in head_parts(state.head):
        start, stop = part.shard
        local = sum(table.nbytes for table in part.head.row_state().values())
        # The other ranks' tables are not here, and shards differ by one class at most.
        rows += local / max(stop - start, 1) * part.head.num_classes
    return weights + moments + round(rows)


def _check_people(config: Config, facts: RunFacts) -> Iterator[str]:
    if facts.people < FEWEST_PEOPLE and config.model.init_from is None:
        yield (
            f"{config.data.train}: {count_text(facts.people, 'person', 'people')} are too few for a new network, which "
            "needs thousands to tell others apart; fine-tune a model on them by `facetrain finetune`"
        )


def _check_cores(world: World) -> Iterator[str]:
    if world.local_size > world.host_cores:
        yield (
            f"{world.local_size} processes share {count_text(world.host_cores, 'core')} of this machine, and wait for "
            "each other in every step; start at most one per core (--nproc-per-node)"
        )


def _check_learning_rate(config: Config, facts: RunFacts) -> Iterator[str]:
    highest = HIGHEST_LR[config.optim.name]
    if config.optim.lr > highest:
        rate = suited_rate(facts)
        yield (
            f"optim.lr: {config.optim.lr:g} is above {highest:g}, with which {config.optim.name} does not learn; set "
            f"it to {rate.value}: {rate.reason}"
        )
    usual = MuonSettings().lr
    if (muon := config.optim.muon) and muon.lr > _MOST_OF_MUON * usual:
        yield f"optim.muon.lr: {muon.lr:g} is more than {_MOST_OF_MUON} times the usual rate, {usual:g}"


def _check_schedule(config: Config, schedule: StepSchedule) -> Iterator[str]:
    optim, max_steps, last_step = config.optim, config.train.max_steps, schedule.steps_of_all_epochs
    epochs = schedule.epochs(schedule.total_steps)
    if max_steps and max_steps > last_step:
        yield f"train.max_steps: {max_steps:,} is never reached: the last epoch ends after step {last_step:,}"
    if late := [f"{each:g}" for each in optim.milestones if each >= epochs]:
        yield (
            f"optim.milestones: {', '.join(late)} {'is' if len(late) == 1 else 'are'} not before the end, epoch "
            f"{epochs:.4g}: the rate does not fall there"
        )
    if optim.warmup_epochs >= epochs:
        yield f"optim.warmup_epochs: {optim.warmup_epochs:g} of {epochs:.4g} epochs: the run ends in the warm-up"


def _check_effects(config: Config, *, scaled: bool) -> Iterator[str]:
    """Yield the values that have no effect; a preset whose margin is changed to another type has such, too.

    `scaled` says whether `--batch auto` has changed the rate with the batch.
    """
    margin, data, optim = config.head.margin, config.data, config.optim
    if config.recipe == "head" and (optim.power, margin.gradient) == (2.0, "exact"):
        yield "recipe: head has no effect: the config gives both of its keys, optim.power and head.margin.gradient"
    for key in unused_keys(margin):
        # The recipe `head` gives every type its gradient.
        if (key, config.recipe) != ("gradient", "head"):
            yield f"head.margin.{key}: {getattr(margin, key)} has no effect with type {margin.type}"
    if large := [size for size in data.augment.low_resolution_sizes if size >= data.image_size]:
        yield (
            f"data.augment.low_resolution_sizes: {', '.join(map(str, large))} shrinks no image of {data.image_size} "
            "pixels"
        )
    for section, name, is_used, condition in (
        ("data", "max_skipped", data.bad_records == "skip", "data.bad_records: skip"),
        ("head", "expectation_margin", config.has_expectations, "head.expectations"),
        ("head", "momentum_dtype", optim.moments > 0, "optim.momentum"),
        ("optim", "momentum", optim.name == "sgd", "optim.name: sgd"),
        ("optim", "betas", optim.name == "adamw", "optim.name: adamw"),
        # The recipe `head` gives every schedule its power.
        (
            "optim",
            "power",
            config.recipe == "head" or optim.schedule == "polynomial",
            "optim.schedule: polynomial",
        ),
        ("optim", "gamma", optim.schedule == "steps", "optim.schedule: steps"),
        ("optim", "batch_scaling", bool(config.train.stages) or scaled, "train.stages or --batch auto"),
    ):
        settings = getattr(config, section)
        value = getattr(settings, name)
        # The config of a run folder has all keys: those with their default were not asked for.
        if not is_used and value != type(settings).model_fields[name].default:
            yield f"{section}.{name}: {json.dumps(value)} has no effect without {condition}"


def _check_mixture(config: Config, source: FaceDataset) -> Iterator[str]:
    """Yield the values of a mixture's heads that have no effect."""
    heads = source.heads if isinstance(source, MixtureDataset) else None
    if heads is None:
        return
    distill = config.distill
    counts_alike = distill is not None and (distill.loss, distill.margin_weight) == ("cosine", 0)
    for number, (head, margin) in enumerate(
        zip(heads, margins_of_datasets(config, heads), strict=True), start=1
    ):
        if counts_alike and head.loss_weight != 1:
            yield (
                f"{config.data.train}: loss_weight of dataset {number}: {head.loss_weight:g} has no effect with "
                "distill.loss: cosine and distill.margin_weight: 0"
            )
        for key in unused_keys(margin):
            if key in head.margin:  # and not in the margin of the config, which is reported for itself
                given = f"{config.data.train}: margin of dataset {number}: {key}: {head.margin[key]}"
                yield f"{given} has no effect with type {margin.type}"


def _check_suited(config: Config, facts: RunFacts, settled: Set[str]) -> Iterator[str]:
    """Yield what costs the run much of its speed or its accuracy, but for the keys that are settled."""
    for suited, fault in unsuited_settings(config, facts):
        if suited.key not in settled:
            yield f"{suited.key}: {fault}; set it to {suited.value}: {suited.reason}"


def _check_lengths(state: TrainState) -> Iterator[str]:
    """Yield a warning if a network of one's own normalizes its embeddings, and the margin reads their lengths."""
    network = state.backbone
    margins = [part.head.margin.name for part in head_parts(state.head) if part.head.needs_norms]
    if not margins or not isinstance(network, OwnNetwork):
        return
    noise = torch.rand(
        2, 3, network.image_size, network.image_size, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad(), evaluation_mode(network):
        length_B = network(noise.to(state.world.device)).float().norm(dim=1)
    if torch.allclose(length_B[0], length_B[1], rtol=1e-4):
        yield (
            f"head.margin.type: {margins[0]} reads the length of an embedding as the quality of its image, and the "
            f"network of model.backbone returns embeddings of equal length, {length_B[0]:.4g}; remove the "
            "normalization at its end, or choose another margin"
        )


def check_free_space(config: Config, folder: Path, size: int, steps: int, *, held: int) -> Iterator[str]:
    """Yield a warning if the disk cannot hold all checkpoints, of `size` bytes each, that a run of `steps` steps keeps.

    `held` counts those that a run that continues has already.

    Raises:
        RunError: the disk cannot hold one checkpoint.
    """
    if not steps:
        return
    free = shutil.disk_usage(folder).free
    advice = "free some space, set run.dir to a larger disk"
    if free < size:
        raise RunError(
            f"{folder}: a checkpoint takes {size / 1e6:,.1f} MB, and the disk has {free / 1e6:,.1f} MB free; {advice}"
        )
    # The next checkpoint is written before the oldest is removed.
    kept = config.checkpoint.keep + (config.checkpoint.best_metric is not None)
    count = min(max(kept + 1 - held, 1), -(-steps // config.checkpoint.every_steps))
    if free < size * count:
        yield (
            f"{folder}: {count} checkpoints of {size / 1e6:,.1f} MB are written, and the disk has {free / 1e6:,.1f} "
            f"MB free; {advice}, or lower checkpoint.keep"
        )


def _require_no_identity(folder: Path, source: FaceDataset) -> None:
    """Check that a new run is not beside the folders of the people: its page has an image.

    Raises:
        UsageError: it is.
    """
    # Of an image folder, also as a part of a mixture or with some people left out, this is the folder of the people.
    for path in source.files:
        if path.is_dir() and folder.resolve().parent.samefile(path):
            raise UsageError(
                f"{folder}: is among the folders of the people in {path}, and would be read as one of them; choose "
                "another --run-dir or run.dir"
            )


def _require_renames(folder: Path) -> None:
    """Rename a folder that holds a file: checkpoints appear by such a rename, and object stores cannot do it.

    Raises:
        RunError: the file system refuses it.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=RENAME_CHECK, ignore_cleanup_errors=True) as name:
        before = Path(name, "before")
        before.mkdir()
        (before / "file").write_bytes(b"a")
        try:
            os.rename(before, Path(name, "after"))
        except OSError as error:
            raise RunError(
                f"{folder}: its file system cannot rename a folder with a file ({error_reason(error)}), as a "
                "checkpoint needs: set run.dir to another file system"
            ) from error
