"""Calibration of a model file: embed known people, measure thresholds, store them in the file."""

# N images   D embedding

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from facetrain.data.formats.set_names import has_bin_suffix
from facetrain.data.images.copies import different_images
from facetrain.distributed.world import join
from facetrain.embeddings.embed_images import embed_images, open_embedder
from facetrain.embeddings.image_inputs import LazySequence, image_location, read_input
from facetrain.embeddings.inference import Inference
from facetrain.errors import DataError, PairsError, RunError, UsageError
from facetrain.files import stamp_of, write_fault
from facetrain.models.embedding_model import EmbeddingModel, open_model
from facetrain.models.model_file import THRESHOLDS_KEY, newest_model_file, save_model
from facetrain.models.onnx_limits import external_files
from facetrain.models.onnx_network import copy_with_metadata
from facetrain.models.read_model import is_graph
from facetrain.models.weight_files import METADATA_KEY, read_weights
from facetrain.progress import ProgressCallback
from facetrain.remote.download import is_download
from facetrain.verify.calibration import (
    MAX_IMAGES,
    Threshold,
    calibrate,
    reachable_fmrs,
    require_enough_people,
    sampled_images,
)
from facetrain.verify.metrics.draws import Draws
from facetrain.verify.metrics.roc import FMRS
from facetrain.verify.sets.pair_set import is_set_name, load_pair_set
from facetrain.verify.training_images import refuse_training_images


def calibrate_model(
    model: Path,
    target: str,
    data_dir: Path,
    *,
    fmrs: Sequence[float] = (),
    output: Path | None = None,
    seed: int = 0,
    inference: Inference | None = None,
    progress: ProgressCallback | None = None,
) -> tuple[Path | None, list[Threshold]]:
    """Measure the thresholds of a model and store them in its file; return the file and the thresholds.

    An MXNet network has no place for them: the file is None then.

    Args:
        model: a run folder, a .safetensors, .onnx or MXNet file, or, with `output`, any file of a facetrain backbone.
        target: a dataset, or a `.bin` set with a table of subjects; a path, or the name of a set in `data_dir`.
        data_dir: folder of the sets that are given by name.
        fmrs: false match rates; by default the rates of `calibration.FMRS` that the data reaches.
        output: file for the model with its thresholds, .safetensors, or .onnx for an ONNX model. By default, the file
            is replaced; a download never is.
        seed: seed of the sampled people of a large dataset and of the bootstrap.
        inference: device, batch size and precision.
        progress: called with the number of embedded images and their total.

    Raises:
        ModelError: the model cannot be opened, its file cannot hold thresholds, or an embedding is not finite.
        UsageError: there is no file that can hold the thresholds, it is a download, or its folder is not writable.
        DataError: the data cannot be read, has no labels, has too few impostor pairs for one of the rates, or shows the
            people that the model was trained on.
        RunError: the file was replaced while the images were embedded, or cannot be written.
    """
    path = _writable_model(model, output)
    images, labels = read_known_people(target, data_dir)
    # All pairs of images are compared, so the number of images is bounded.
    chosen = sampled_images(labels, seed=seed)
    if not len(chosen):
        raise DataError(
            f"{target}: every person has more than {MAX_IMAGES:,} images, too many to compare with each other; use "
            "fewer images of each person"
        )
    # Copies in a dataset would be genuine pairs of cosine 1.
    images, labels = _without_copies(images, labels, chosen, target)
    # The last of these is then refused, with what it needs.
    fmrs = tuple(dict.fromkeys(fmrs)) or reachable_fmrs(labels) or FMRS[:1]
    require_enough_people(labels, fmrs, target)
    inference = inference or Inference()
    # The graph of an ONNX file is copied from the file, the weights of the others are in memory.
    source = model if path is not None and path.suffix == ".onnx" else path
    stamp = _stamp(source)
    with join(inference.device) as world:
        opened = open_model(model, world.device)
        refuse_training_images(images, target, model, opened.metadata)
        unit_ND, _ = embed_images(open_embedder(opened, world, inference), images, target, progress=progress)
    name = os.path.basename(os.path.abspath(target))  # also of the current folder, "."
    thresholds = calibrate(unit_ND, labels, fmrs, data=name, draws=Draws(seed=seed))
    if path is not None and world.is_leader:
        if _stamp(source) != stamp:
            raise RunError(
                f"{source}: was replaced meanwhile, and the thresholds do not hold for it; calibrate again"
            )
        _store(thresholds, model, opened, path)
    return path, thresholds


def _stamp(path: Path | None) -> list[int] | None:
    """Return by what a change of a file is known; None if there is none."""
    return stamp_of(path.stat()) if path is not None and path.exists() else None


def _store(thresholds: list[Threshold], model: Path, opened: EmbeddingModel, path: Path) -> None:
    stored = [asdict(threshold) for threshold in thresholds]
    if path.suffix == ".onnx":
        copy_with_metadata(model, path, {THRESHOLDS_KEY: json.dumps(stored)})
    else:
        save_model(path, opened.network.state_dict(), opened.metadata | {THRESHOLDS_KEY: stored})


def read_known_people(target: str, data_dir: Path) -> tuple[Sequence[bytes], np.ndarray]:
    """Return the images of a dataset, or the different images of a set, and the person of each, int (N,).

    Raises:
        DataError: the data cannot be read, or does not say who is on its images.
    """
    path = Path(target)
    if not has_bin_suffix(path) and path.exists() and not is_set_name(target, data_dir):
        images, _, labels, _ = read_input(path)
        if (labels < 0).any():
            raise DataError(f"{target}: has no labels; use a dataset with one subfolder per person")
        return images, labels
    pairs = load_pair_set(target, data_dir)
    if pairs.subject is None:
        raise PairsError(
            f"{target}: has no table {pairs.name}.subjects.csv, and without it two images of one person would count as "
            "an impostor pair; write the set with facetrain data pairs, or give a dataset"
        )
    return _without_copies(pairs.images, pairs.subject, np.arange(len(pairs.images)), target)


def _without_copies(
    images: Sequence[bytes], labels: np.ndarray, chosen: np.ndarray, name: str
) -> tuple[Sequence[bytes], np.ndarray]:
    """Return the different ones of the chosen images, without those of several people, and their labels, int (N,).

    A message names the place that an image has among all of them.
    """
    read = [images[index] for index in chosen.tolist()]
    first_N, _ = different_images(read, labels[chosen])
    kept_N = chosen[first_N]
    different = LazySequence(
        len(kept_N),
        lambda number: read[first_N.item(number)],
        lambda number: image_location(images, kept_N.item(number), name),
    )
    return different, labels[kept_N]


def _writable_model(model: Path, output: Path | None) -> Path | None:
    """Return the file that gets the thresholds, before anything is measured; None for an MXNet network."""
    path = newest_model_file(model) or model
    has_graph = is_graph(path)
    suffix = ".onnx" if has_graph else ".safetensors"
    if has_graph and path.suffix != ".onnx":
        if output is not None:
            raise UsageError(
                f"--output {output}: MXNet files have no place for thresholds; leave it out, and they are printed"
            )
        return None
    can_hold = has_graph or (
        path.suffix == ".safetensors" and path.is_file() and METADATA_KEY in read_weights(path).metadata
    )
    if output is None and not can_hold:
        raise UsageError(
            f"{model}: has no model file that can hold thresholds, such as the one of a finished run; give --output "
            "FILE.safetensors for a copy of the model with the thresholds"
        )
    if output is None and is_download(path):
        raise UsageError(
            f"{model}: is a download, which stays as it is; give --output FILE{suffix} for a copy of the model with "
            "the thresholds"
        )
    written = output or path
    if written.suffix != suffix:
        raise UsageError(f"{written}: the model is written as {suffix}; give a name with this suffix")
    if fault := write_fault(written.parent):
        raise UsageError(
            f"{written}: {written.parent}: {fault}; give --output FILE{suffix} in another folder"
        )
    if has_graph and not os.path.samefile(written.parent, path.parent) and external_files(path):
        raise UsageError(
            f"{written}: the weights of {path} are in a file beside it; give --output in the folder {path.parent}"
        )
    return written
