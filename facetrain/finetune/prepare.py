"""Preparation of a fine-tuning: aligned faces, held-out images, and a config with the reason for every choice."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from facetrain.config.changes import differences, lookup
from facetrain.config.loading import (
    CONFIG_FILE,
    is_set,
    load_config,
    override_keys,
    plain_config,
    values_of_overrides,
)
from facetrain.config.paths import with_absolute_paths
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.landmark_finder import LandmarkFinder
from facetrain.distinct import distinct
from facetrain.distributed.devices import pick_device
from facetrain.embeddings.inference import Inference
from facetrain.errors import DataError, RunError, UsageError
from facetrain.files import (
    make_folder,
    os_errors_as,
    read_regular_text,
    require_utf_8,
    sha256_of,
    write_atomically,
)
from facetrain.finetune.choices import Choice, Facts, choose, config_text
from facetrain.finetune.first_model import backbone_of, trainable_model
from facetrain.finetune.photo_faces import needed_finder, split_faces, write_faces, write_pairs
from facetrain.finetune.workplace import Bar, Request, Workplace
from facetrain.models.model_digest import digest_model_files
from facetrain.run.folder.data_digests import digest_labels, digest_records
from facetrain.run.folder.run_state import FINISHED, read_state
from facetrain.run.parts.teacher_embeddings import write_teacher_embeddings
from facetrain.run.request import as_override
from facetrain.telemetry.log import warn
from facetrain.text import shell_path
from facetrain.verify.sets.pair_set import PairSet, load_pair_sets, require_distinct_names
from facetrain.verify.training_images import HOLD_OUT_ADVICE, sets_of_training_images

_PLAN_FILE, _COMMAND_FILE = "finetune.yaml", "command.txt"


@dataclass(frozen=True)
class Prepared:
    """Fine-tuning that is ready to train."""

    place: Workplace
    model: Path
    """First model; of an ONNX or MXNet file the trainable copy."""
    targets: tuple[str, ...]
    choices: list[Choice]
    config: Config
    text: str
    """The config as YAML, with the reasons for the choices as comments."""

    def write_config(self, say: Callable[[str], None]) -> None:
        """Write the config of the run, once the run has accepted it, and say the command that reads it.

        Raises:
            RunError: it cannot be written.
        """
        path = self.place.folder / _PLAN_FILE
        with os_errors_as(RunError, path):
            write_atomically(path, self.text)
        say(f"the same run by hand: facetrain train --config {shell_path(path)}")


def prepare(
    request: Request, finder: LandmarkFinder | None, say: Callable[[str], None], bar: Bar
) -> Prepared:
    """Align the faces, hold images out and choose the settings.

    Args:
        request: what the user asks for.
        finder: what finds the landmarks; None for aligned faces.
        say: called with each line for the user.
        bar: opens a progress bar with a title.

    Raises:
        UsageError: a path is not UTF-8, the output exists, the photos are not aligned and there is no detector, or
            there is no such device.
        DataError: the photos cannot be read, or are too few.
        ModelError: the model cannot be fine-tuned.
    """
    for path in (request.photos, request.model, request.output):
        require_utf_8(os.path.abspath(path))
    source = _open_photos(request)
    place, backbone = Workplace(request.output), backbone_of(request.model)
    others = _open_targets(request.targets, place)
    # With the photos as they are: a wrong setting is an error now, and not after the search for faces.
    facts = _facts(request, request.model, backbone, place, source)
    _, config = _config_of(choose(facts, request.overrides), request, place)
    pick_device(config.train.device, 0, cpu_setting="--set train.device=cpu")
    if not place.faces.exists():
        finder = needed_finder(request, source, finder, backbone["image_size"], say)
        _begin_output(request, source)
        write_faces(request, place, finder, backbone["image_size"], say, bar)
    split_faces(request, place, say, bar)
    for remark in sets_of_training_images(others, open_dataset(place.train), str(place.train)):
        warn(f"{remark}; {HOLD_OUT_ADVICE}")
    write_pairs(request, place, say)
    model = trainable_model(request.model, backbone, place)
    if not place.embeddings.exists():
        inference = Inference(config.train.device)
        with bar("embedding") as progress:
            write_teacher_embeddings(model, place.train, place.embeddings, inference, progress=progress)
    facts = _facts(request, model, backbone, place, open_dataset(place.train))
    request = _with_settings_of_ended_run(request, facts, place)
    choices = choose(facts, request.overrides)
    for choice in choices:
        say(f"  {choice.settings}")
        say(f"    {choice.reason}")
    text, config = _config_of(choices, request, place)
    return Prepared(place, model, request.targets, choices, config, text)


def _open_photos(request: Request) -> FaceDataset:
    """Open the photos, after a check that the output is new, or was begun with the same request."""
    output = request.output
    if output.exists() and not request.resume:
        raise UsageError(f"{output}: already exists; choose another --output, or continue with --resume")
    source, command = open_dataset(request.photos), output / _COMMAND_FILE
    if command.exists() and read_regular_text(command) != _command_of(request, source):
        raise UsageError(
            f"{output}: was begun with other photos, another model, detector or file of landmarks, or another seed; "
            "choose another --output"
        )
    return source


def _begin_output(request: Request, source: FaceDataset) -> None:
    """Create the output, with the command that may continue it."""
    with os_errors_as(RunError, request.output):
        make_folder(request.output)
        write_atomically(request.output / _COMMAND_FILE, _command_of(request, source))


def _command_of(request: Request, source: FaceDataset) -> str:
    """Return what a resumed command must have in common with the first one: its arguments, and what it reads."""
    photos, model = (shell_path(os.path.abspath(path)) for path in (request.photos, request.model))
    aligned_by = "none"
    if request.aligner:
        with os_errors_as(DataError, request.aligner):
            aligned_by = sha256_of(request.aligner)
    return (
        f"facetrain finetune {photos} --model {model} --seed {request.seed}\n"
        f"# people of the photos {digest_labels(source)}, places in their files {digest_records(source)}\n"
        f"# files of the model {digest_model_files(request.model)}, of the detector or the landmarks {aligned_by}\n"
    )


def _open_targets(targets: tuple[str, ...], place: Workplace) -> list[PairSet]:
    """Open the verification sets of other people: an error now, and not after the training."""
    others = load_pair_sets(targets, Path())
    require_distinct_names([place.pairs.stem, place.set_aside_pairs.stem, *(pairs.name for pairs in others)])
    return others


def _facts(
    request: Request, model: Path, backbone: dict[str, Any], place: Workplace, train: FaceDataset
) -> Facts:
    """Return what the choices depend on."""
    device = lookup(values_of_overrides(request.overrides), "train.device")
    return Facts(
        model=request.address if request.address and model == request.model else str(model),
        backbone=backbone,
        train=str(place.train),
        people=len(distinct(train.labels)),
        images=train.num_images,
        held_out=str(place.pairs),
        teacher_cache=str(place.embeddings),
        has_gpu=device != "cpu" and torch.cuda.is_available(),
    )


def _with_settings_of_ended_run(request: Request, facts: Facts, place: Workplace) -> Request:
    """Return the request with what the run was trained with, if it has ended, where the command sets nothing else."""
    if read_state(place.run).state != FINISHED:
        return request
    ended = load_config(place.run / CONFIG_FILE)
    then = Workplace(Path(ended.run.dir))  # the output may have been moved since
    facts = replace(
        facts,
        model=str(then.first) if facts.model == str(place.first) else facts.model,
        train=str(then.train),
        held_out=str(then.pairs),
        teacher_cache=str(then.embeddings),
    )
    _, config = _config_of(choose(facts, request.overrides), request, then)
    changes = differences(plain_config(with_absolute_paths(config)), plain_config(ended))
    given = override_keys(request.overrides)
    kept = [as_override(change.key, change.now) for change in changes if not is_set(given, change.key)]
    return replace(request, overrides=(*kept, *request.overrides))


def _config_of(choices: list[Choice], request: Request, place: Workplace) -> tuple[str, Config]:
    return config_text(choices, request.overrides, place.run.name, str(place.folder))
