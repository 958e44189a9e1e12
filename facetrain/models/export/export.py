"""Export of a network to files, which appear complete and compared with the network, or not at all."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from facetrain.errors import FacetrainError, ModelError, RunError
from facetrain.files import error_as, error_reason, sync_file, sync_folder
from facetrain.models.embedding_model import EmbeddingModel
from facetrain.models.export.deployed import Deployed
from facetrain.models.export.example_inputs import example_pixels, inputs_of_file, split_images
from facetrain.models.export.formats import (
    FORMATS,
    Exported,
    ExportOptions,
    FileComparison,
    Runtime,
    Similarity,
)
from facetrain.models.onnx_network import OnnxNetwork
from facetrain.own_parts import is_of_other_code
from facetrain.progress import ProgressCallback, ignore_progress

_LEAST_COSINE = 0.5
"""An int8 file with a smaller mean cosine to the network is not written."""
_TOLERANCE = 1e-3
"""Largest difference from the network to accept. Other kernels round differently: 1e-6 to 1e-5 is usual."""
_NUM_EXAMPLES = 5
"""Random images for the comparison if no faces are given."""
_CHUNK = 16
"""Images that are compared at a time; not the number with which a network is traced, to test the free batch size."""


def export(
    model: EmbeddingModel,
    format: str,
    path: Path,
    options: ExportOptions,
    *,
    progress: ProgressCallback = ignore_progress,
) -> Exported:
    """Write a network to a file of a format, a row of `FORMATS`, and perhaps to a second one beside it.

    The file appears after its embeddings have been compared with the embeddings of the network. `progress` is called
    with the number of compared images.

    Raises:
        ModelError: the network was opened from an ONNX file or has diverged, or the format cannot store it, or its own
            code fixes the number of images or decides by their numbers.
        RunError: the files cannot be written, or their embeddings differ too much.
    """
    row = FORMATS[format]
    write = row.load()
    require_exportable(model, format)
    comparison = None
    with _new_files(row.files(path)) as folder, _explaining(model, options):
        with _quiet():
            runtime: Runtime | None = write(model, folder / path.name, options)
        if runtime is not None:
            comparison = _compare(path, runtime, model, options, progress)
    return Exported([file for file in row.files(path) if file.exists()], comparison)


@contextmanager
def _explaining(model: EmbeddingModel, options: ExportOptions) -> Iterator[None]:
    """Give the errors of exporters and of onnxruntime words for the code of a network that is not facetrain's.

    Raises:
        ModelError: in place of an error of another program.
    """
    try:
        yield
    except (FacetrainError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # they have no common base
        if not is_of_other_code(getattr(model.network, "network", model.network)):
            raise
        fixed = "" if options.batch else ", or give one number of images by --format onnx --batch N"
        raise ModelError(
            f"{model.description}: its code cannot be exported: it may fix the number of images, such as "
            f"x.reshape(len(x), -1) in place of x.flatten(1), or decide by numbers of the image; change it{fixed} "
            f"({type(error).__name__}: {error_reason(error)})"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and logs of other programs, which advise on deprecated parts and other tools.

    A failed conversion ends with an error of one line, and not with the traceback that they log.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def _new_files(files: Sequence[Path]) -> Iterator[Path]:
    """Yield a temporary folder; its files of these names move beside each other when the block ends without an error.

    The first file is needed, the others belong to it: older ones are replaced or removed. After a crash there are all
    new files, all old ones, or no first one, so that a program never opens a graph with the weights of another.

    Raises:
        RunError: the operating system refuses.
    """
    first, *others = files
    try:
        with tempfile.TemporaryDirectory(prefix=f".{first.name}.", dir=first.parent) as name:
            folder = Path(name)
            yield folder
            for file in folder.iterdir():
                with file.open("rb") as opened:
                    sync_file(opened.fileno(), file)
            # First the old first file goes: a crash now leaves no graph that opens the weights of another.
            if others:
                first.unlink(missing_ok=True)
            for file in (*others, first):
                if (folder / file.name).exists():
                    os.replace(folder / file.name, file)
                else:
                    file.unlink(missing_ok=True)
            sync_folder(first.parent)
    except OSError as error:  # it may name the temporary folder, which the user has not given
        raise error_as(RunError, first, error) from error


def require_exportable(model: EmbeddingModel, format: str) -> None:
    """Refuse a network that onnxruntime runs, which has no torch operations to export, and one that has diverged.

    Raises:
        ModelError: the model was opened from an ONNX file, or has a weight that is not finite, or the format cannot
            store it.
    """
    if isinstance(model.network, OnnxNetwork):
        raise ModelError(f"{model.description}: cannot be exported; give the model that it was exported from")
    if FORMATS[format].stores_weights and "backbone" not in model.metadata:
        raise ModelError(
            f"{model.description}: is a graph of another program, which --format {format} cannot store; "
            "use onnx or torch_export"
        )
    # Else the comparison with the file would fail, and not name the reason.
    for name, weight in model.network.state_dict().items():
        if not weight.isfinite().all():
            raise ModelError(
                f"{model.description}: {name} has numbers that are not finite; the network has diverged, "
                "give an earlier checkpoint"
            )


def _compare(
    path: Path, runtime: Runtime, model: EmbeddingModel, options: ExportOptions, progress: ProgressCallback
) -> FileComparison:
    """Compare a file with the network, on `options.images` or else on random images.

    An int8 file is compared on images that it was not calibrated with, and only the directions of its embeddings must
    resemble the network's.

    Args:
        path: The final path of the file, for the message.
        runtime: The file, opened.
        model: The network.
        options: The options with which the file was written.
        progress: Called with the number of compared images.

    Raises:
        RunError: the embeddings differ by more than the tolerance, or are not numbers.
    """
    if options.int8:
        _, faces = split_images(options, model.image_size)
    else:
        faces = example_pixels(model, _NUM_EXAMPLES) if options.images is None else options.images
    difference, cosine = _differences(runtime, model, options, faces, progress)
    # "not <" instead of ">=": the comparison with NaN is false.
    if options.int8 and not cosine.mean >= _LEAST_COSINE:
        raise RunError(
            f"{path}: not written: the mean cosine of its embeddings with the network's is {cosine.mean:.3f}; "
            "give images like the training images with --images"
        )
    if not options.int8 and not difference < _TOLERANCE:
        raise RunError(
            f"{path}: not written: its embeddings differ from the network's by {difference:.2g} of their size, "
            f"more than {_TOLERANCE:g}; try another version of torch or {runtime.name.split()[0]}"
        )
    return FileComparison(difference, cosine)


def _differences(
    runtime: Runtime,
    model: EmbeddingModel,
    options: ExportOptions,
    faces: Tensor,
    progress: ProgressCallback,
) -> tuple[float, Similarity]:
    """Return the largest difference of the embeddings, as a share of the largest number, and their cosines."""
    deployed = Deployed(model, options).eval()
    expected, found, count = [], [], len(faces)
    if options.batch:  # the last faces once more, to fill the last batch
        faces = torch.cat([faces, faces[-1:].expand(-len(faces) % options.batch, -1, -1, -1)])
    for pixels in faces.split(options.batch or _CHUNK):
        inputs = inputs_of_file(model, options, pixels)
        with torch.no_grad():
            expected.append(deployed(*inputs))
        found.append(torch.from_numpy(runtime.run(*(tensor.numpy() for tensor in inputs))))
        progress(min(sum(map(len, found)), count), count)
    expected_ND, found_ND = torch.cat(expected)[:count], torch.cat(found)[:count]
    difference = float((found_ND - expected_ND).abs().max() / expected_ND.abs().max())
    cosine_N = torch.nn.functional.cosine_similarity(found_ND, expected_ND)
    return difference, Similarity(float(cosine_N.mean()), float(cosine_N.min()), count)
