"""Embedding of images from any input: an image, a folder, a dataset, a `.rec` or a `.bin`."""

# N images   D embedding

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from facetrain.cpu_cores import usable_cores
from facetrain.data.dataset import FaceDataset, image_landmarks, original_name
from facetrain.data.formats.bin import read_bin
from facetrain.data.formats.image_folder import folders_with_images
from facetrain.data.formats.landmark_file import read_landmarks_beside
from facetrain.data.images.align import align
from facetrain.data.images.header import IMAGE_SUFFIXES
from facetrain.data.open_dataset import DATASET_SUFFIXES, is_dataset_folder, open_dataset
from facetrain.data.tools.landmarks import YuNet
from facetrain.distributed.world import World, join
from facetrain.embeddings.embedder import EncodedImage, ImageEmbedder, Landmarks
from facetrain.embeddings.embedding_files import Embeddings
from facetrain.embeddings.inference import Inference
from facetrain.embeddings.normalization import embedding_lengths, l2_normalize, require_finite
from facetrain.embeddings.photo_check import PhotoCheck
from facetrain.errors import DataError, ImageError
from facetrain.files import os_errors_as, printable
from facetrain.models.inference_network import inference_network
from facetrain.models.model_file import EmbeddingModel, open_model
from facetrain.progress import ProgressCallback
from facetrain.telemetry.log import warn

_CHUNK = 1 << 16
"""Images that are embedded at a time: 128 MiB of embeddings with 512 float32 numbers."""
T = TypeVar("T")


def embed_input(
    model: Path,
    input: Path,
    inference: Inference | None = None,
    *,
    flip: bool = True,
    detector: Path | None = None,
    progress: ProgressCallback | None = None,
) -> Embeddings:
    """Return the unit embeddings and qualities of an image, a folder of images, a dataset, a `.rec` or a `.bin`.

    More than one chunk of embeddings is kept in a temporary file that is mapped into memory. `progress` is
    called with the number of embedded images and their total. `detector` is as in `embed_images`.

    Raises:
        ModelError: the model cannot be opened, or an embedding is not finite.
        DataError: the input cannot be read, or the disk has no space for the temporary file.
    """
    inference = inference or Inference()
    images, names, labels = read_input(input)
    # After the input, so that a wrong path is reported before the network is loaded.
    with join(inference.device) as world:
        opened = open_model(model, world.device)
        embedding, quality = embed_images(
            open_embedder(opened, world, inference), images, str(input),
            flip=flip, landmarks=None if detector else input_landmarks(opened, input), detector=detector,
            progress=progress,
        )  # fmt: skip
    return Embeddings(embedding, names, labels, input, quality)


def open_embedder(opened: EmbeddingModel, world: World, inference: Inference) -> ImageEmbedder:
    """Return the embedder of an open model for the ranks of `world`."""
    return ImageEmbedder(
        inference_network(opened.network, world.device, bf16=inference.bf16),
        opened.image_size,
        inference.batch_size,
        world.device,
        workers=inference.workers or max(1, usable_cores() // world.local_size),
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
    progress: ProgressCallback | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the unit embeddings, float32 (N, D), and their lengths before normalization, float32 (N,).

    The embeddings are an array in memory or, if there are many, in a temporary file. With `flip`, they are the sums of
    the embeddings of image and mirror image.

    Warns if the images look like whole photos. With `detector`, a YuNet file, they are whole photos, whose faces are
    aligned first. `name` is the input, for messages. `landmarks` are the landmarks of the images, (N, 5, 2), see
    `ImageEmbedder`.

    Raises:
        ModelError: an embedding is not finite.
        DataError: the detector cannot be opened, or an image has no face that it finds.
    """
    location: Callable[[int], str] = getattr(images, "location", None) or "image {}".format
    crop, count = AlignedFaces(detector, location) if detector else PhotoCheck(), len(images)
    quality_N = np.empty(count, np.float32)

    def embed(embedder: ImageEmbedder, indices: range) -> np.ndarray:
        embedding_ND = embedder.embed(
            images, name=name, flip=flip, crop=crop, indices=indices, landmarks=landmarks
        )
        require_finite(embedding_ND, name, first=indices.start)
        quality_N[indices.start : indices.stop] = embedding_lengths(embedding_ND)
        return l2_normalize(embedding_ND)

    kept = None
    for indices, chunk in embed_in_chunks(embedder, embed, 0, count, _CHUNK, progress):
        if len(chunk) == count:
            crop.warn(name, location)
            return chunk, quality_N
        if kept is None:
            kept = _temporary_rows(count, chunk.shape[1])
        kept[indices.start : indices.stop] = chunk
    assert kept is not None, "no images"
    crop.warn(name, location)
    return kept, quality_N


class AlignedFaces:
    """Alignment of whole photos by the face that a detector finds: a `Crop` of `ImageEmbedder`."""

    def __init__(self, detector: Path, location: Callable[[int], str]) -> None:
        self._find, self._location = YuNet(detector), location

    def __call__(self, image: np.ndarray, index: int, size: int) -> np.ndarray:
        """Return the aligned face, (size, size, 3), of an image uint8 (H, W, 3).

        Raises:
            ImageError: the image has no face that the detector finds.
        """
        points = self._find(self._location(index), image)
        if points is None:
            raise ImageError(
                f"{self._location(index)}: the detector finds no face; leave the photo out, or all photos like it: "
                "facetrain data pack PHOTOS --output FOLDER --detector yunet --skip-bad"
            )
        return align(image, points, size)

    def warn(self, name: str, location: Callable[[int], str]) -> None:
        """Warn of photos with several faces of similar size; the arguments are as in `PhotoCheck.warn`."""
        if several := self._find.several_faces:
            warn(
                f"{name}: {len(several):,} photos have several faces of similar size, of which the one nearest the "
                f"center was taken, such as {min(several)}"
            )


def _temporary_rows(count: int, size: int) -> np.ndarray:
    """Return an array of float32 (count, size) in an unnamed file in TMPDIR, which disappears with the array.

    Raises:
        DataError: the disk has no space for the file.
    """
    folder = Path(tempfile.gettempdir())
    with (
        os_errors_as(DataError, folder, "free some space, or set TMPDIR to another disk"),
        tempfile.TemporaryFile() as file,
    ):
        # A full disk is reported now and not after hours; and a write to mapped memory would end the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, 4 * count * size)
        return np.asarray(np.memmap(file, np.float32, "w+", shape=(count, size)))


def embed_in_chunks(
    embedder: ImageEmbedder,
    embed: Callable[[ImageEmbedder, range], np.ndarray],
    first: int,
    count: int,
    chunk: int,
    progress: ProgressCallback | None,
) -> Iterator[tuple[range, np.ndarray]]:
    """Yield ranges of at most `chunk` of the images from `first` to `count`, and what `embed` returns for each.

    `progress` is called with the number of embedded images and their total.
    """

    def report(done: int, _: int) -> None:
        if progress is not None:
            progress(start + done, count)

    embedder = replace(embedder, progress=report)
    for start in range(first, count, chunk):
        indices = range(start, min(start + chunk, count))
        yield indices, embed(embedder, indices)


def read_input(input: Path) -> tuple[Sequence[bytes], Sequence[str], np.ndarray]:
    """Return the encoded images of an input, their names, and their labels, int (N,), −1 for no label.

    Images are read on access, except those of a `.bin`. Images beside a dataset, and below a folder of images, are
    not read; the first call for a folder warns of them.

    Raises:
        DataError: the input does not exist or cannot be read.
    """
    if input.suffix == ".bin":
        members, _ = read_bin(input)
        return members, [f"{input.name}:{index}" for index in range(len(members))], np.full(len(members), -1)
    files = _image_files(input)
    if _is_dataset(input, files):
        if files:
            _warn_once(
                f"{input}: read as a dataset; the images beside it ({files[0].name}) are not read; to embed such "
                "images, move them to another folder"
            )
        source = open_dataset(input)
        names = LazySequence(source.num_images, lambda index: _image_name(source, index))
        return dataset_images(source), names, np.asarray(source.labels, np.int64)
    for name in folders_with_images(input, 1) if files else ():
        _warn_once(
            f"{input}: read as a folder of images; the images in its subfolder {name} are not read; to embed them, "
            "give the subfolder"
        )
    paths = files or [input]
    read_image_file(paths[0])
    return lazy_files(paths), [path.name for path in paths], np.full(len(paths), -1)


def dataset_images(source: FaceDataset) -> Sequence[bytes]:
    """Return the encoded images of a dataset, which are read on access."""
    return LazySequence(source.num_images, source.read, source.location)


def lazy_files(paths: Sequence[Path]) -> LazySequence[bytes]:
    """Return the contents of files, each read on access: millions of images are never in memory together.

    The access to an item raises DataError if the file cannot be read.
    """
    return LazySequence(
        len(paths), lambda index: read_image_file(paths[index]), lambda index: printable(str(paths[index]))
    )


def read_image_file(path: Path) -> bytes:
    """Return the content of an image file.

    Raises:
        DataError: it cannot be read.
    """
    with os_errors_as(DataError, path):
        return path.read_bytes()


def input_landmarks(opened: EmbeddingModel, input: Path) -> np.ndarray | None:
    """Return the landmarks of the images of an input, (N, 5, 2), for a network that takes them; None without any.

    Raises:
        DataError: the landmark file does not fit the input.
    """
    if not opened.takes_landmarks:
        return None
    if input.suffix == ".bin":
        return read_landmarks_beside(input, len(read_bin(input)[0]))
    return image_landmarks(open_dataset(input)) if _is_dataset(input, _image_files(input)) else None


def _image_name(source: FaceDataset, index: int) -> str:
    """Return the path of a packed image in the dataset that was packed; otherwise the location of the image."""
    name = original_name(source, index)
    location = source.location(index)
    return location if name is None or location.endswith("/" + name) else name


def _is_dataset(input: Path, files: list[Path]) -> bool:
    """Return whether an input is a dataset, and not an image or a folder of images, `files`."""
    if files:
        return is_dataset_folder(input)
    return input.is_dir() or input.suffix.lower() in DATASET_SUFFIXES


@cache
def _warn_once(message: str) -> None:
    """Print a warning once: a command may read its input again."""
    warn(message)


def _image_files(folder: Path) -> list[Path]:
    """Return the images directly in a folder.

    Hidden files are left out, as in a dataset: macOS writes a file `._NAME.jpg` beside an image.
    """
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(
        path for path in entries if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")
    )


class LazySequence(Sequence[T]):
    """Sequence whose items a function computes on access.

    `location`, if there is one, is an attribute that names the place of an image for messages.
    """

    def __init__(
        self, count: int, item: Callable[[int], T], location: Callable[[int], str] | None = None
    ) -> None:
        self._indices, self._item, self.location = range(count), item, location

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        """Return an item, or a list of the items of a slice."""
        index = self._indices[index]
        return list(map(self._item, index)) if isinstance(index, range) else self._item(index)
