"""Embeddings of pictures wherever they lie, with their names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.checkpoint.model_file import EmbeddingModel, open_model
from facetrain.data.bin import read_bin
from facetrain.data.dataset import RecordSource, open_source
from facetrain.data.listing import LIST_SUFFIXES
from facetrain.data.source import PICTURE_SUFFIXES, FaceSource
from facetrain.distributed.world import World, join
from facetrain.errors import DataError
from facetrain.verify.embed import PictureEmbedder, Progress, autocast
from facetrain.verify.embeddings import Embeddings

_DATASET_FILES = frozenset({".rec", ".yaml", ".yml"}) | LIST_SUFFIXES


def embed_input(
    model: Path,
    input: Path,
    *,
    flip: bool = True,
    device: str = "auto",
    batch_size: int = 256,
    bf16: bool = False,
    told: Progress | None = None,
) -> Embeddings:
    """Embed a picture, a folder of pictures, a dataset, a .rec or a .bin; `told` hears how far it has come.

    Raises:
        DataError: there is nothing that can be embedded.
    """
    pictures, names, labels = read_input(input)
    with join(device) as world:
        opened = open_model(model, world.device)
        embedding = _embed(
            opened, pictures, str(input), world, flip=flip, batch_size=batch_size, bf16=bf16, told=told
        )
    return Embeddings(embedding, names, labels)


def embed_pictures_at(model: Path, paths: Sequence[Path], *, device: str = "auto") -> np.ndarray:
    """Return the unit embeddings of picture files, float32 (N, D)."""
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
    told: Progress | None = None,
) -> np.ndarray:
    embedder = PictureEmbedder(
        opened.network,
        opened.image_size,
        batch_size,
        world.device,
        workers=os.cpu_count() or 1,
        prepare=opened.prepare,
        autocast=autocast(world.device, bf16),
        told=told,
    )
    embedding = embedder.summed(pictures, name=name, flip=flip)
    return np.asarray(
        embedding / np.maximum(np.linalg.norm(embedding, axis=1, keepdims=True), 1e-12), np.float32
    )


def read_input(input: Path) -> tuple[Sequence[bytes], list[str], np.ndarray]:
    """Return the encoded pictures of a picture, folder, dataset, .rec or .bin, their names and labels (−1: none).

    Those of a dataset are read when they are asked for.
    """
    if input.suffix == ".bin":
        images, _ = read_bin(input)
        return images, [f"{input.name}:{number}" for number in range(len(images))], np.full(len(images), -1)
    flat = _flat_pictures(input)
    if flat:
        return [_bytes_of(path) for path in flat], [path.name for path in flat], np.full(len(flat), -1)
    if input.is_dir() or input.suffix.lower() in _DATASET_FILES:
        records = input.suffix == ".rec" and input.is_file()
        source = RecordSource(input.parent, name=input.name) if records else open_source(input)
        names = [source.where(number) for number in range(source.num_images)]
        return _Pictures(source), names, np.asarray(source.labels, np.int64)
    return [_bytes_of(input)], [input.name], np.array([-1])


def _flat_pictures(input: Path) -> list[Path]:
    entries = input.iterdir() if input.is_dir() else ()
    return sorted(path for path in entries if path.suffix.lower() in PICTURE_SUFFIXES)


class _Pictures(Sequence[bytes]):
    """The pictures of a dataset, each read when it is asked for."""

    def __init__(self, source: FaceSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return self._source.num_images

    def __getitem__(self, number: Any) -> Any:
        return self._source.read(number)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
