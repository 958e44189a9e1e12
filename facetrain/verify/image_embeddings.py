"""Embeddings of images wherever they lie, with their names."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from facetrain.cpu_cores import usable_cores
from facetrain.data.dataset import IMAGE_SUFFIXES
from facetrain.data.formats.bin import read_bin
from facetrain.data.formats.image_list import LIST_SUFFIXES
from facetrain.data.formats.record_dataset import RecordDataset
from facetrain.data.open_dataset import open_dataset
from facetrain.distributed.world import World, join
from facetrain.errors import DataError
from facetrain.models.model_file import EmbeddingModel, open_model
from facetrain.progress import ProgressCallback
from facetrain.verify.embedder import ImageEmbedder, autocast
from facetrain.verify.embedding_files import Embeddings

_DATASET_FILES = frozenset({".rec", ".yaml", ".yml"}) | LIST_SUFFIXES
_IN_MEMORY = 1 << 16
"""Embeddings that are held in memory: 128 MiB of 512 numbers each. Where there are more, they go to a file."""
T = TypeVar("T")


def embed_input(
    model: Path,
    input: Path,
    *,
    flip: bool = True,
    device: str = "auto",
    batch_size: int = 256,
    bf16: bool = False,
    progress: ProgressCallback | None = None,
) -> Embeddings:
    """Embed an image, a folder of images, a dataset, a .rec or a .bin; `progress` hears how far it has come.

    Many embeddings lie in a scratch file that is mapped into memory.

    Raises:
        DataError: there is nothing that can be embedded, or no room for the scratch file.
    """
    pictures, names, labels = read_input(input)
    with join(device) as world:
        opened = open_model(model, world.device)
        embedding = _embed(
            opened,
            pictures,
            str(input),
            world,
            flip=flip,
            batch_size=batch_size,
            bf16=bf16,
            progress=progress,
        )
    return Embeddings(embedding, names, labels)


def embed_image_files(model: Path, paths: Sequence[Path], *, device: str = "auto") -> np.ndarray:
    """Return the unit embeddings of image files, float32 (N, D)."""
    pictures = [_bytes_of(path) for path in paths]
    with join(device) as world:
        opened = open_model(model, world.device)
        return _embed(
            opened, pictures, " and ".join(map(str, paths)), world, flip=True, batch_size=len(paths)
        )


def _embed(
    opened: EmbeddingModel,
    pictures: Sequence[bytes],
    name: str,
    world: World,
    *,
    flip: bool,
    batch_size: int,
    bf16: bool = False,
    progress: ProgressCallback | None = None,
) -> np.ndarray:
    count, start = len(pictures), 0
    embedder = ImageEmbedder(
        opened.network,
        opened.image_size,
        batch_size,
        world.device,
        workers=usable_cores(),
        prepare=opened.prepare,
        autocast=autocast(world.device, bf16),
        progress=(lambda done, _: progress(start + done, count)) if progress else None,
    )
    whole: np.ndarray | None = None
    for start in range(0, count, _IN_MEMORY):
        stretch = range(start, min(start + _IN_MEMORY, count))
        part = _unit(embedder.embed(pictures, name=name, flip=flip, indices=stretch))
        if len(part) == count:
            return part
        if whole is None:
            whole = spill_buffer((count, part.shape[1]), np.float32)
        whole[start : stretch.stop] = part
    assert whole is not None, "no images"
    return whole


def _unit(embedding: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(embedding, axis=1, keepdims=True)
    return np.asarray(embedding / np.maximum(length, 1e-12), np.float32)


def read_input(input: Path) -> tuple[Sequence[bytes], Sequence[str], np.ndarray]:
    """Return the encoded images of an image, folder, dataset, .rec or .bin, their names and labels (−1: none).

    Images and names of a dataset are read and made when they are asked for.
    """
    if input.suffix == ".bin":
        images, _ = read_bin(input)
        return images, [f"{input.name}:{number}" for number in range(len(images))], np.full(len(images), -1)
    flat = _flat_images(input)
    if flat:
        return [_bytes_of(path) for path in flat], [path.name for path in flat], np.full(len(flat), -1)
    if input.is_dir() or input.suffix.lower() in _DATASET_FILES:
        records = input.suffix == ".rec" and input.is_file()
        source = RecordDataset(input.parent, name=input.name) if records else open_dataset(input)
        count = source.num_images
        pictures, names = _OnDemand(count, source.read), _OnDemand(count, source.location)
        return pictures, names, np.asarray(source.labels, np.int64)
    return [_bytes_of(input)], [input.name], np.array([-1])


def _flat_images(input: Path) -> list[Path]:
    entries = input.iterdir() if input.is_dir() else ()
    return sorted(path for path in entries if path.suffix.lower() in IMAGE_SUFFIXES)


class _OnDemand(Sequence[T]):
    """Items that are made when they are asked for, one by its number at a time."""

    def __init__(self, count: int, item: Callable[[int], T]) -> None:
        self._count, self._item = count, item

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self._count:
            raise IndexError(number)
        return self._item(number)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def spill_buffer(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    """Return an array of zeros in a file without a name, in TMPDIR; it is gone with the last reference.

    Raises:
        DataError: there is no room for it.
    """
    array = np.empty((0,), dtype)
    size = int(np.prod(shape)) * array.itemsize
    try:
        with tempfile.TemporaryFile() as file:
            if hasattr(os, "posix_fallocate"):
                # Asked for now: memory mapped from a full disk ends the process when it is written.
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
            return np.asarray(np.memmap(file, dtype, "w+", shape=shape))
    except OSError as error:
        raise DataError(
            f"{tempfile.gettempdir()}: no room for {size:,} bytes of scratch ({error.strerror or error}); "
            "free some, or set TMPDIR to a folder on another disk"
        ) from error
