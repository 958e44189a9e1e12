"""Preparation of a fine-tuning: aligned faces, held-out images, and a config with the reason for every choice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from facetrain.backbone.base import DEFAULT_IMAGE_SIZE
from facetrain.backbone.zoo import build_backbone
from facetrain.config.loading import values_of_overrides
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset, evenly_spread
from facetrain.data.images.copies import different_images
from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.data.skipped_files import skipped_summary
from facetrain.data.tools.landmark_finder import LandmarkFinder
from facetrain.data.tools.pack import pack
from facetrain.data.tools.selection import Selection
from facetrain.data.tools.writing import SKIPPED_TABLE, write_parts
from facetrain.embeddings.inference import Inference
from facetrain.embeddings.photo_check import PhotoCheck
from facetrain.errors import ModelError, RunError, UnreadableError, UsageError
from facetrain.files import make_folder, os_errors_as, read_regular_text, write_atomically
from facetrain.finetune.choices import Choice, Facts, choose, config_text
from facetrain.finetune.held_out import (
    Part,
    count_people,
    require_enough,
    split_photos,
    write_photo_pairs,
)
from facetrain.models.embedding_model import open_model
from facetrain.models.identify_backbone import identify_backbone
from facetrain.models.initialize_from import initialize_backbone
from facetrain.models.model_file import describe_backbone, save_model
from facetrain.models.preprocessing import require_trainable_input
from facetrain.models.read_model import is_graph, read_model
from facetrain.progress import ProgressCallback
from facetrain.run.folder.compatibility import lookup
from facetrain.run.folder.data_digests import digest_labels, digest_records
from facetrain.run.parts.open_data import evenly_spread_images
from facetrain.run.parts.teacher_embeddings import write_teacher_embeddings
from facetrain.telemetry.log import warn
from facetrain.text import count_text, listed, shell_path
from facetrain.verify.sets.pair_set import PairSet, load_pair_sets, require_distinct_names
from facetrain.verify.training_images import HOLD_OUT_ADVICE, sets_of_training_images

Bar = Callable[[str], AbstractContextManager[ProgressCallback]]
"""Opens a progress bar with a title."""
_PLAN_FILE, _COMMAND_FILE = "finetune.yaml", "command.txt"
_GRAPH_NETWORKS = ("mbf_small", "mbf", "mbf_large", "r18", "r34", "r50", "r100")
"""Networks that an ONNX or MXNet file may have."""
_EXAMINED = 64
"""Images whose alignment is examined, evenly spread."""


class Workplace:
    """Files of a fine-tuning in its output folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faces = folder / "faces"
        """Aligned faces, a dataset, of which `train`, `held_out` and `set_aside` are the parts, see `held_out.py`."""
        self.train, self.held_out, self.set_aside = (
            folder / "data" / name for name in ("train", "held_out", "set_aside")
        )
        self.pairs, self.set_aside_pairs = folder / "held_out.bin", folder / "set_aside.bin"
        """Verification sets of the held-out faces, and of the people set aside."""
        self.first = folder / "first.safetensors"
        """Trainable copy of a first model that is an ONNX or MXNet file."""
        self.embeddings = folder / "embeddings.safetensors"
        """Embeddings of the training images by the first model, which is the teacher."""
        self.run = folder / "run"
        self.model = folder / "model.safetensors"
        """The better model."""
        self.page = folder / "report.html"


@dataclass(frozen=True)
class Request:
    """Request of the user."""

    photos: Path
    """Dataset of photos or of aligned faces."""
    model: Path
    """Any model that `model.init_from` takes."""
    output: Path
    """Folder of the fine-tuning."""
    address: str | None = None
    """Address from which `model` was downloaded, for the config."""
    targets: tuple[str, ...] = ()
    """Verification sets of other people."""
    overrides: tuple[str, ...] = ()
    """Config values, KEY=VALUE, which win over the choices."""
    resume: bool = False
    """Whether the output may have the parts that an interrupted command has finished."""
    seed: int = 0
    """Seed of the images that are held out and of the people who are set aside."""


@dataclass(frozen=True)
class Prepared:
    """Fine-tuning that is ready to train."""

    place: Workplace
    model: Path
    """First model; of an ONNX or MXNet file the trainable copy."""
    targets: tuple[str, ...]
    choices: list[Choice]
    config: Config


def prepare(
    request: Request, finder: LandmarkFinder | None, say: Callable[[str], None], bar: Bar
) -> Prepared:
    """Align the faces, hold images out, choose the settings and write the config.

    Args:
        request: what the user asks for.
        finder: detector of the landmarks; None for aligned faces.
        say: called with each line for the user.
        bar: opens a progress bar with a title.

    Raises:
        UsageError: the output exists, or the photos are not aligned and there is no detector.
        DataError: the photos cannot be read, or are too few.
        ModelError: the model cannot be fine-tuned.
    """
    _require_output(request)
    place, backbone = Workplace(request.output), backbone_of(request.model)
    others = _open_targets(request.targets, place)
    # With the photos as they are: a wrong setting is an error now, and not after the search for faces.
    facts = _facts(request, request.model, backbone, place, open_dataset(request.photos))
    _, config = _config_of(choose(facts), request, place)
    if not place.faces.exists():
        _write_faces(request, place, finder, backbone["image_size"], say, bar)
    _write_parts(request, place, say, bar)
    for remark in sets_of_training_images(others, open_dataset(place.train), str(place.train)):
        warn(f"{remark}; {HOLD_OUT_ADVICE}")
    _write_pairs(request, place, say)
    model = _trainable_model(request.model, backbone, place)
    if not place.embeddings.exists():
        inference = Inference(config.train.device)
        with bar("embedding") as progress:
            write_teacher_embeddings(model, place.train, place.embeddings, inference, progress=progress)
    choices = choose(_facts(request, model, backbone, place, open_dataset(place.train)))
    config = _write_config(choices, request, place, say)
    return Prepared(place, model, request.targets, choices, config)


def backbone_of(model: Path) -> dict[str, Any]:
    """Return the arguments of `build_backbone` for the network of a model file, a run or a checkpoint.

    Raises:
        ModelError: the file cannot be read, or is no network that facetrain can train.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    if not is_graph(model):
        weights, description, origin = read_model(model)
        require_trainable_input(description, origin)
        described = description if "backbone" in description else identify_backbone(weights, origin)
        return {"image_size": DEFAULT_IMAGE_SIZE} | described["backbone"]
    opened = open_model(model, torch.device("cpu"))
    for name in _GRAPH_NETWORKS:
        options: dict[str, Any] = describe_backbone(
            name, embedding_size=opened.embedding_size, image_size=opened.image_size
        )["backbone"]
        with suppress(ModelError):
            initialize_backbone(build_backbone(**options), model, None)
            return options
    raise ModelError(
        f"{model}: is not {listed(_GRAPH_NETWORKS)}, whose weights can be taken from such a file; give a run, a "
        ".safetensors file or arcface_torch's .pt"
    )


def _require_output(request: Request) -> None:
    """Check that the output is new, or was begun with the same request."""
    output = request.output
    if output.exists() and not request.resume:
        raise UsageError(f"{output}: already exists; choose another --output, or continue with --resume")
    command = output / _COMMAND_FILE
    if command.exists() and read_regular_text(command) != _command_of(request, open_dataset(request.photos)):
        raise UsageError(
            f"{output}: was begun with other photos, another model or another seed; choose another --output"
        )


def _command_of(request: Request, source: FaceDataset) -> str:
    """Return what a resumed command must have in common with the first one: its arguments, and the photos."""
    photos, model = (shell_path(os.path.abspath(path)) for path in (request.photos, request.model))
    return (
        f"facetrain finetune {photos} --model {model} --seed {request.seed}\n"
        f"# people of the photos {digest_labels(source)}, places in their files {digest_records(source)}\n"
    )


def _open_targets(targets: tuple[str, ...], place: Workplace) -> list[PairSet]:
    """Open the verification sets of other people: an error now, and not after the training."""
    others = load_pair_sets(targets, Path())
    require_distinct_names([place.pairs.stem, place.set_aside_pairs.stem, *(pairs.name for pairs in others)])
    return others


def _write_faces(
    request: Request,
    place: Workplace,
    finder: LandmarkFinder | None,
    image_size: int,
    say: Callable[[str], None],
    bar: Bar,
) -> None:
    """Write the aligned faces as a dataset; list what is left out."""
    photos, check = request.photos, PhotoCheck()
    source = open_dataset(photos)
    require_enough(source.labels, photos)
    for index, image in enumerate(_sample(source)):
        check(image, index, image_size)
    finding = check.finding()
    if finding is not None and finder is None:
        raise UsageError(f"{photos}: {finding}; align the faces by OpenCV's face detector: --detector yunet")
    if finding is None and finder is not None:
        say(f"{photos}: the images are aligned faces already, so the detector is not used")
        finder = None
    with os_errors_as(RunError, request.output):
        make_folder(request.output)
        write_atomically(request.output / _COMMAND_FILE, _command_of(request, source))
    with bar("aligning faces") as progress:
        written = pack(
            photos, place.faces, image_size=image_size, skip_bad=True,
            landmarks=finder, checking=progress, progress=progress,
        )  # fmt: skip
    people = count_text(written.identities, "person", "people")
    say(f"{place.faces}: {count_text(written.images, 'face')} of {people}")
    if written.skipped:
        say(f"left out {count_text(len(written.skipped), 'file')}, see {place.faces / SKIPPED_TABLE}:")
        for line in skipped_summary(written.skipped):
            say(f"  {line}")
    if rivals := getattr(finder, "several_faces", None):
        say(
            f"several faces in {len(rivals):,} photos, of which the one nearest the center was taken: {listed(rivals)}"
        )


def _sample(source: FaceDataset) -> Iterator[np.ndarray]:
    """Yield images that can be decoded, evenly spread over a dataset, uint8 (H, W, 3) RGB."""
    for number in evenly_spread(source.num_images, _EXAMINED):
        with suppress(UnreadableError):
            yield decode_rgb(source.read(number), location="")


def _write_parts(request: Request, place: Workplace, say: Callable[[str], None], bar: Bar) -> None:
    """Write the parts of the faces: for training, held out, and set aside."""
    source = open_dataset(place.faces)
    different = different_images(map(source.read, range(source.num_images)))
    require_enough(source.labels[different], request.photos)
    if place.held_out.parent.exists():
        return
    if copies := source.num_images - len(different):
        say(f"left out {copies:,} images that are copies of others: the held-out images have to be new ones")
    part_N = split_photos(source.labels[different], seed=request.seed)
    parts = {}
    for part, path in zip(Part, (place.train, place.held_out, place.set_aside), strict=True):
        numbers = different[part_N == part]
        parts[path.name] = Selection(source, [place.faces], numbers, source.labels[numbers])
    with bar("holding images out") as progress:
        write_parts(parts, place.held_out.parent, progress=progress)


def _write_pairs(request: Request, place: Workplace, say: Callable[[str], None]) -> None:
    """Write the verification sets of the faces that are not trained on."""
    for dataset, pairs in ((place.held_out, place.pairs), (place.set_aside, place.set_aside_pairs)):
        if not pairs.exists():
            write_photo_pairs(dataset, pairs, seed=request.seed)
    held_out, aside = open_dataset(place.held_out), open_dataset(place.set_aside)
    say(
        f"{held_out.num_images:,} images of {count_people(held_out.labels)} are held out, to show what the fine-tuned "
        f"model gains; {count_people(aside.labels)} are set aside with all images, to show what it loses on others"
    )


def _trainable_model(model: Path, backbone: dict[str, Any], place: Workplace) -> Path:
    """Return the first model, or the trainable copy of an ONNX or MXNet file."""
    if not is_graph(model):
        return model
    if not place.first.exists():
        _write_trainable_copy(model, backbone, open_dataset(place.train), place.first)
    return place.first


def _write_trainable_copy(path: Path, options: dict[str, Any], source: FaceDataset, copy: Path) -> None:
    """Write the network of an ONNX or MXNet file as a model file with batch norm statistics.

    Such a file often has batch norms merged into other layers. Their statistics are measured once, on training images,
    so that the run, its teacher and the averages with it start from the same weights.
    """
    backbone = build_backbone(**options)
    initialize_backbone(backbone, path, partial(evenly_spread_images, source, options["image_size"]))
    save_model(copy, backbone.state_dict(), describe_backbone(**options))


def _facts(
    request: Request, model: Path, backbone: dict[str, Any], place: Workplace, train: FaceDataset
) -> Facts:
    """Return what the choices depend on."""
    device = lookup(values_of_overrides(request.overrides), "train.device")
    return Facts(
        model=request.address if request.address and model == request.model else str(model),
        backbone=backbone,
        train=str(place.train),
        people=len(np.unique(train.labels)),
        images=train.num_images,
        held_out=str(place.pairs),
        teacher_cache=str(place.embeddings),
        has_gpu=device != "cpu" and torch.cuda.is_available(),
    )


def _config_of(choices: list[Choice], request: Request, place: Workplace) -> tuple[str, Config]:
    return config_text(choices, request.overrides, place.run.name, str(place.folder))


def _write_config(
    choices: list[Choice], request: Request, place: Workplace, say: Callable[[str], None]
) -> Config:
    """Write the config of the run, and say the choices and the command."""
    for choice in choices:
        say(f"  {choice.settings}")
        say(f"    {choice.reason}")
    text, config = _config_of(choices, request, place)
    path = place.folder / _PLAN_FILE
    write_atomically(path, text)
    say(f"the same run by hand: facetrain train --config {shell_path(path)}")
    return config
