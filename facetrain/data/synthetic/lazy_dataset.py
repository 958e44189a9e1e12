"""A drawn training set whose images are there at once: each is drawn when it is first asked for."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from facetrain.data.formats.record_dataset import RecordDataset
from facetrain.data.synthetic.image_cache import ImageCache
from facetrain.data.synthetic.write import draw_image, write_dataset
from facetrain.distributed.process_lifetime import end_with_parent
from facetrain.errors import DataError

_LEAST_HASTE = 19
"""Of the writing process: it takes the time that training leaves."""


class LazyDataset:
    """The training set that `write_dataset` puts into a folder, to the byte; read from there once it stands.

    Until then the processes that have it lend each other what they have drawn.
    """

    def __init__(
        self, folder: Path, *, identities: int, images_per_identity: int, image_size: int, seed: int
    ) -> None:
        self._folder, self._image_size, self._seed = folder, image_size, seed
        self._per_identity = images_per_identity
        self._written: RecordDataset | None = None
        self._album = ImageCache.beside(folder, place=image_size**2)  # a JPEG of them takes half of it
        self.labels = np.repeat(np.arange(identities, dtype=np.int32), images_per_identity)
        self.num_images = len(self.labels)
        self.num_classes = identities

    def read(self, number: int) -> bytes:
        """Return an image as it is encoded."""
        if self._written is None and self._folder.exists():
            self._written = RecordDataset(self._folder)
        if self._written is not None:
            return self._written.read(number)
        return self._kept(number) or self._draw(number)

    def _kept(self, number: int) -> bytes | None:
        return self._album.get(number) if self._album else None

    def _draw(self, number: int) -> bytes:
        identity, image = divmod(number, self._per_identity)
        drawn = draw_image(self._seed, identity, image, self._image_size)
        if self._album:
            self._album.put(number, drawn)
        return drawn

    def location(self, number: int) -> str:
        """Say which image of whom it is."""
        identity, image = divmod(number, self._per_identity)
        return f"{self._folder}: image {image} of drawn person {identity}"


@contextmanager
def writing_beside(source: LazyDataset, folder: Path, **wanted: Any) -> Iterator[Callable[[], None]]:
    """Have another process write the dataset meanwhile, with the arguments of `write_dataset`.

    Yields what waits until that has ended; a process that is not waited for is stopped. If it fails, it says
    so itself: who trains has the images all the same.
    """
    arguments = (source, folder, wanted)
    process = get_context("spawn").Process(target=_write, args=arguments, name="writer", daemon=True)
    process.start()
    try:
        yield process.join
    finally:
        process.terminate()
        process.join()


def _write(source: LazyDataset, folder: Path, wanted: dict[str, Any]) -> None:
    end_with_parent(signal.SIGTERM)
    # Ctrl-C reaches the whole group of processes; what it means is for the training process to decide.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leaves no scratch folder
    os.nice(_LEAST_HASTE)
    cv2.setNumThreads(1)
    try:
        write_dataset(folder, workers=1, drawn=source.read, **wanted)
    except DataError as error:
        print(f"warning: the drawn images were not kept: {error}", file=sys.stderr, flush=True)
