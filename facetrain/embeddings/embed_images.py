"""Embedding of the images of an input in chunks, with their qualities."""

# N images   D embedding

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from facetrain.data.images.align import align, aligned_landmarks
from facetrain.data.skipped_files import SkippedFile
from facetrain.data.tools.aligned_images import NoFaceError, skipped_image
from facetrain.data.tools.yunet import YuNet
from facetrain.distributed import collectives
from facetrain.distributed.world import World, join
from facetrain.embeddings.embedder import EncodedImage, ImageEmbedder, Landmarks
from facetrain.embeddings.embeddings import Embeddings
from facetrain.embeddings.image_inputs import LazySequence, image_location, read_input
from facetrain.embeddings.inference import Inference
from facetrain.embeddings.model_fingerprint import model_fingerprint
from facetrain.embeddings.normalization import (
    are_normalized,
    embedding_lengths,
    l2_normalize,
    require_finite,
)
from facetrain.embeddings.photo_check import PhotoCheck
from facetrain.errors import DataError, UnreadableError, UsageError
from facetrain.face_landmarks import TEMPLATE_SIZE, normalize_landmarks
from facetrain.files import os_errors_as
from facetrain.models.embedding_model import EmbeddingModel, open_model
from facetrain.models.inference_network import inference_network
from facetrain.models.onnx_network import OnnxNetwork
from facetrain.progress import ProgressCallback
from facetrain.telemetry.log import warn
from facetrain.text import count_text

_CHUNK = 1 << 16
"""Images that are embedded at a time: 128 MiB of embeddings with 512 float32 numbers."""
_EXAMINED, _ALIGNED = 1000, 2.0
"""Rows of landmarks that are examined, and the shift of their points by an alignment, in pixels of `TEMPLATE_SIZE`, up
to which half of them are landmarks of aligned faces."""


def embed_input(
    model: Path,
    input: Path,
    inference: Inference | None = None,
    *,
    flip: bool = True,
    detector: Path | None = None,
    skipped: list[SkippedFile] | None = None,
    advice: str = "",
    progress: ProgressCallback | None = None,
) -> Embeddings:
    """Return the unit embeddings and qualities of an image, a folder of images, a dataset, a `.rec` or a `.bin`.

    More than one chunk of embeddings is kept in a temporary file that is mapped into memory. `progress` is called on
    the leader with the number of embedded images and their total. `detector` is as in `embed_images`. Images that
    cannot be read or have no face are left out and added to `skipped`; None: the first one ends the command, with
    `advice` at the end of the message.

    Raises:
        ModelError: the model cannot be opened, or an embedding is not finite.
        DataError: the input or an image cannot be read, or the disk has no space for the temporary file.
        UsageError: an ONNX file is to run in bfloat16.
    """
    inference = inference or Inference()
    images, names, labels, read_landmarks = read_input(input)
    # After the input, so that a wrong path is reported before the network is loaded.
    with join(inference.device) as world:
        opened = open_model(model, world.device)
        embedder, faults = open_embedder(opened, world, inference), dict[int, UnreadableError]()
        detector = needed_detector(detector, read_landmarks, str(input))
        landmarks = read_landmarks() if opened.takes_landmarks and not detector else None
        with _advising(advice):
            embedding, quality = embed_images(
                embedder, images, str(input),
                flip=flip, landmarks=landmarks, detector=detector,
                faults=None if skipped is None else faults, progress=progress,
            )  # fmt: skip
        fingerprint = model_fingerprint(embedder)
    if skipped is not None and faults:
        skipped += [skipped_image(names[index], faults[index]) for index in sorted(faults)]
        kept = np.delete(np.arange(len(images)), list(faults))
        names, labels = LazySequence(len(kept), partial(_name_of, names, kept)), labels[kept]
    return Embeddings(embedding, names, labels, input, quality, fingerprint, flip)


def needed_detector(
    detector: Path | None, read_landmarks: Callable[[], np.ndarray | None], name: str
) -> Path | None:
    """Return the detector for the images of an input; None, with a warning, for aligned faces.

    Landmarks of aligned faces stay where they are if they are aligned again. Those of a detector would move the faces:
    the embeddings of a photo, from a packed dataset and from its file, would differ.
    """
    if detector is None or (landmarks_N52 := read_landmarks()) is None:
        return detector
    first_N52 = landmarks_N52[:_EXAMINED]
    found_N52 = TEMPLATE_SIZE * first_N52[~np.isnan(first_N52).any((1, 2))] - 0.5  # as `normalize_landmarks`
    shifts = [np.abs(aligned_landmarks(points, TEMPLATE_SIZE) - points).mean() for points in found_N52]
    if not shifts or np.median(shifts) > _ALIGNED:
        return detector
    warn(f"{name}: has the landmarks of aligned faces, so the detector is not used")
    return None


@contextmanager
def _advising(advice: str) -> Iterator[None]:
    """Add what to do to the error of an image that cannot be read."""
    try:
        yield
    except UnreadableError as error:
        if advice:
            error.args = (f"{error}; {advice}",)
        raise


def _name_of(names: Sequence[str], kept: np.ndarray, place: int) -> str:
    return names[kept.item(place)]


def open_embedder(opened: EmbeddingModel, world: World, inference: Inference) -> ImageEmbedder:
    """Return the embedder of an open model for the ranks of `world`.

    Raises:
        UsageError: an ONNX file, whose number formats are fixed, is to run in bfloat16.
    """
    if inference.bf16 and isinstance(opened.network, OnnxNetwork):
        raise UsageError(f"{opened.description}: has number formats of its own; remove --bf16")
    return ImageEmbedder(
        inference_network(opened.network, world.device, bf16=inference.bf16),
        opened.image_size,
        inference.batch_size,
        world.device,
        workers=inference.workers or world.cores,
        prepare=opened.prepare,
    )


def embed_images(
    embedder: ImageEmbedder,
    images: Sequence[EncodedImage],
    name: str,
    *,
    flip: bool = True,
    landmarks: Landmarks | None = None,
    detector: Path | None = None,
    faults: dict[int, UnreadableError] | None = None,
    is_unit: bool | None = None,
    progress: ProgressCallback | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the unit embeddings, float32 (N, D), and their lengths before normalization, float32 (N,).

    The lengths are NaN for a network that normalizes its embeddings itself (`is_unit`); if that is not known, the first
    two images are embedded once more to find out. The embeddings are an array in memory or, if there are many, in a
    temporary file. With `flip`, they are the sums of the embeddings of image and mirror image.

    Warns if the images look like whole photos. With `detector`, a YuNet file, they are whole photos, whose faces are
    aligned first. `name` is the input, for messages. `landmarks` are the landmarks of the images, (N, 5, 2), see
    `ImageEmbedder`; with `detector` they are those that it finds.

    With `faults`, images that cannot be read or have no face are added to it by their indices, and have no row.

    Raises:
        ModelError: an embedding is not finite.
        DataError: the detector cannot be opened; an image cannot be read or has no face that it finds, or with `faults`
            all images.
    """
    if faults is not None:
        embedder = replace(embedder, on_unreadable=faults.__setitem__)
    left_out = {} if faults is None else faults
    location = partial(image_location, images, name=name)
    count = len(images)
    crop: AlignedFaces | PhotoCheck = PhotoCheck(getattr(images, "location", None))
    if detector:
        crop = AlignedFaces(detector, location, count)
        landmarks = crop.landmarks_N52
    qualities = list[np.ndarray]()
    if is_unit is None:
        plain_ND = embedder.embed(
            images, name=name, flip=False, crop=crop, indices=range(min(count, 2)), landmarks=landmarks
        )
        is_unit = are_normalized(plain_ND)

    def embed(embedder: ImageEmbedder, indices: range) -> np.ndarray:
        """Return the unit embeddings of the images that have no fault."""
        embedding_ND = embedder.embed(
            images, name=name, flip=flip, crop=crop, indices=indices, landmarks=landmarks
        )
        if faults is not None:
            _exchange(faults, indices)
        kept = [index for index in indices if index not in left_out]
        if len(kept) < len(indices):
            embedding_ND = embedding_ND[np.array(kept, int) - indices.start]
        require_finite(embedding_ND, name, kept)
        qualities.append(
            np.full(len(embedding_ND), np.nan, np.float32) if is_unit else embedding_lengths(embedding_ND)
        )
        return l2_normalize(embedding_ND)

    kept, filled = None, 0
    for indices, chunk in embed_in_chunks(embedder, embed, count, _CHUNK, progress):
        if len(indices) == count:
            kept = chunk
        else:
            kept = _temporary_rows(count, chunk.shape[1]) if kept is None else kept
            kept[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    assert kept is not None, "no images"
    if not filled:
        raise DataError(
            f"{name}: none of the {count:,} images can be used; the first: {left_out[min(left_out)]}"
        )
    crop.warn(name)
    return kept[:filled], np.concatenate(qualities)


def _exchange(faults: dict[int, UnreadableError], indices: range) -> None:
    """Add the faults that other ranks have found in their shares of the images `indices`. Collective."""
    found = [(index, faults[index]) for index in indices if index in faults]
    own = [[index, str(error), isinstance(error, NoFaceError)] for index, error in found]
    for index, message, has_no_face in chain.from_iterable(collectives.gather_json(own)):
        faults.setdefault(index, (NoFaceError if has_no_face else UnreadableError)(message))


class AlignedFaces:
    """Alignment of whole photos by the face that a detector finds: a `Crop` of `ImageEmbedder`."""

    def __init__(self, detector: Path, location: Callable[[int], str], count: int) -> None:
        self._find, self._location = YuNet(detector), location
        self.landmarks_N52 = np.full((count, 5, 2), np.nan, np.float32)
        """Landmarks of the faces that were aligned, as fractions of the sides of the aligned image."""

    def __call__(self, image: np.ndarray, index: int, size: int) -> np.ndarray:
        """Return the aligned face, (size, size, 3), of an image uint8 (H, W, 3).

        Raises:
            NoFaceError: the image has no face that the detector finds.
        """
        points = self._find(self._location(index), image)
        if points is None:
            raise NoFaceError(f"{self._location(index)}: the detector finds no face; leave the photo out")
        self.landmarks_N52[index] = normalize_landmarks(aligned_landmarks(points, size), size, size)
        return align(image, points, size)

    def warn(self, name: str) -> None:
        """Warn of photos with several faces of similar size; `name` is the input."""
        if several := self._find.several_faces:
            warn(
                f"{name}: several faces of similar size in {count_text(len(several), 'photo')}, of which the largest "
                f"one near the center was taken, such as {min(several)}"
            )


def _temporary_rows(count: int, size: int) -> np.ndarray:
    """Return an array of float32 (count, size) in an unnamed file in TMPDIR, which disappears with the array.

    Raises:
        DataError: there can be no file in TMPDIR.
        RunError: the disk has no space for the file.
    """
    folder = Path(tempfile.gettempdir())
    with (
        os_errors_as(DataError, folder, "free some space, or set TMPDIR to another disk"),
        tempfile.TemporaryFile() as file,
    ):
        # A full disk is reported now and not after hours; and a write to mapped memory would end the process.
        os.posix_fallocate(file.fileno(), 0, 4 * count * size)
        return np.asarray(np.memmap(file, np.float32, "w+", shape=(count, size)))


def embed_in_chunks(
    embedder: ImageEmbedder,
    embed: Callable[[ImageEmbedder, range], np.ndarray],
    count: int,
    chunk: int,
    progress: ProgressCallback | None,
) -> Iterator[tuple[range, np.ndarray]]:
    """Yield ranges of at most `chunk` of `count` images, and what `embed` returns for each.

    `progress` is called on the leader with the number of embedded images and their total.
    """

    def report(done: int, _: int) -> None:
        if progress is not None:
            progress(start + done, count)

    embedder = replace(embedder, progress=report)
    for start in range(0, count, chunk):
        indices = range(start, min(start + chunk, count))
        yield indices, embed(embedder, indices)
