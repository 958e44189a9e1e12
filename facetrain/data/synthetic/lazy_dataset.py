"""Synthetic training set that renders each image when it is first read, and a process that writes it to disk."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from facetrain.data.formats.record_dataset import RecordDataset
from facetrain.data.synthetic.dataset_writer import write_dataset
from facetrain.data.synthetic.image_cache import ImageCache
from facetrain.data.synthetic.render import render_jpeg
from facetrain.distributed.process_lifetime import end_with_parent
from facetrain.distributed.spawn import HelperProcess
from facetrain.errors import DataError

_LOWEST_PRIORITY = 19
"""Nice value of the writing process: it uses the CPU time that training leaves."""


class LazyDataset:
    """Training set with the bytes that `write_dataset` writes for the same arguments.

    Images come from the folder as soon as it exists. Until then they are rendered, and the processes that share this
    dataset share the rendered images through an `ImageCache`.
    """

    def __init__(
        self, folder: Path, *, identities: int, images_per_identity: int, image_size: int, seed: int
    ) -> None:
        """Describe the dataset; nothing is rendered yet. The arguments are those of `write_dataset`."""
        self._folder, self._image_size, self._seed = folder, image_size, seed
        self._images_per_identity = images_per_identity
        self._written: RecordDataset | None = None
        # A JPEG of a synthetic image takes about half a byte per pixel.
        self._cache = ImageCache.create(folder, slot_size=image_size**2)
        self.labels = np.repeat(np.arange(identities, dtype=np.int32), images_per_identity)
        self.num_images = len(self.labels)
        self.num_classes = identities

    def read(self, number: int) -> bytes:
        """Return an encoded image."""
        if self._written is None and self._folder.exists():
            self._written = RecordDataset(self._folder)
        if self._written is not None:
            return self._written.read(number)
        return self._cached(number) or self._render(number)

    def _cached(self, number: int) -> bytes | None:
        return self._cache.get(number) if self._cache else None

    def _render(self, number: int) -> bytes:
        identity, image = divmod(number, self._images_per_identity)
        encoded = render_jpeg(self._seed, identity, image, self._image_size)
        if self._cache:
            self._cache.put(number, encoded)
        return encoded

    def location(self, number: int) -> str:
        """Return the location of an image for error messages."""
        identity, image = divmod(number, self._images_per_identity)
        return f"{self._folder}: image {image} of synthetic identity {identity}"


@contextmanager
def write_in_background(source: LazyDataset, folder: Path, **arguments: Any) -> Iterator[Callable[[], None]]:
    """Write the dataset in another process during the block, with the keyword arguments of `write_dataset`.

    Yields a function that waits for the end of that process. If it was not called, the end of the block stops the
    process. A failure to write is a warning on standard error: `source` still renders every image.
    """
    process = HelperProcess(target=_write, args=(source, folder, arguments), name="writer", daemon=True)
    process.start()
    try:
        yield process.join
    finally:
        process.terminate()
        process.join()


def _write(source: LazyDataset, folder: Path, arguments: dict[str, Any]) -> None:
    end_with_parent(signal.SIGTERM)
    # Ctrl-C and SIGUSR1 can reach every process of the group. The training process decides what to do, and ends this
    # one.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # sys.exit, not the default action: the temporary folder must be removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.nice(_LOWEST_PRIORITY)
    cv2.setNumThreads(1)
    try:
        write_dataset(folder, workers=1, read_image=source.read, **arguments)
    except DataError as error:
        print(f"warning: the synthetic dataset was not written: {error}", file=sys.stderr, flush=True)
