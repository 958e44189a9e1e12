"""Reading processes: read, decode and resize images into batch slots, which are shared memory. Imports no torch."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import cv2
import numpy as np

from facetrain.data.dataset import FaceDataset
from facetrain.data.images.decode import NotAnImageError, decode, resize_square
from facetrain.data.shared_array import SharedArray
from facetrain.distributed.spawn import GROUP_SIGNALS
from facetrain.errors import DataError, FacetrainError, ImageError, RunError, UnreadableError

_MAX_REPLACEMENT_TRIES = 100


class BatchSlots:
    """Buffers of the batches that are read ahead; one slot holds this rank's images of one step.

    A reading process that gets them as an argument fills the same memory.
    """

    def __init__(self, slots: int, rows: int, image_size: int) -> None:
        self._index = SharedArray((slots, rows), "int64")
        self._image = SharedArray((slots, rows, image_size, image_size, 3), "uint8")

    @property
    def index(self) -> np.ndarray:
        """Dataset index of each image, int64 (slots, rows)."""
        return self._index.array

    @property
    def image(self) -> np.ndarray:
        """Pixels, uint8 (slots, rows, image_size, image_size, 3)."""
        return self._image.array


@dataclass(frozen=True)
class ReadRequest:
    """Dataset indices of the images to read into rows `row`, `row + 1`, … of a slot."""

    slot: int
    row: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class ReadResult:
    """Outcome of a request: the error that stopped it, and messages about bad images that were replaced."""

    request: ReadRequest
    error: Exception | None = None
    skipped: Sequence[str] = ()


_ADVICE = (
    "write a copy without such images with `facetrain data check DATASET --repair FOLDER`, or set "
    "data.bad_records: skip, which replaces them"
)


class ImageReader:
    """Reads images of a dataset into batch slots, as RGB of the slots' size.

    With `skip_bad`, the next readable image of the dataset replaces a bad one.
    """

    def __init__(self, dataset: FaceDataset, slots: BatchSlots, *, skip_bad: bool) -> None:
        self._dataset, self._slots, self._skip_bad = dataset, slots, skip_bad
        self._size = slots.image.shape[2]

    def read(self, request: ReadRequest) -> ReadResult:
        """Fill the rows of a request; an exception is returned in the result, never raised."""
        skipped: list[str] = []
        image, index_of_row = self._slots.image[request.slot], self._slots.index[request.slot]
        index_of_row[request.row : request.row + len(request.indices)] = request.indices
        try:
            for row, index in enumerate(request.indices, request.row):
                try:
                    image[row] = self._load(index)
                except UnreadableError as error:
                    if not self._skip_bad:
                        error.args = (f"{error}; {_ADVICE}",)
                        raise
                    skipped.append(str(error))
                    image[row], index_of_row[row] = self._load_replacement(index, skipped)
        except Exception as error:  # of any kind: the training process raises it
            return ReadResult(request, _picklable(error), skipped)
        return ReadResult(request, None, skipped)

    def _load(self, index: int) -> np.ndarray:
        try:
            return resize_square(self._decoded(index), self._size)
        except NotAnImageError as error:
            raise ImageError(f"{self._dataset.location(index)}: {error}") from None

    def _decoded(self, index: int) -> np.ndarray:
        try:
            return decode(self._dataset.read(index))
        except NotAnImageError:
            if not self._dataset.forget(index):
                raise
            return decode(self._dataset.read(index))

    def _load_replacement(self, index: int, skipped: list[str]) -> tuple[np.ndarray, int]:
        """Return the next readable image after a bad one and its index."""
        # A function of the index alone, so that every number of ranks and workers makes the same replacements.
        for step in range(1, _MAX_REPLACEMENT_TRIES):
            other = (index + step) % self._dataset.num_images
            try:
                return self._load(other), other
            except UnreadableError as error:
                skipped.append(str(error))
        raise DataError(
            f"{self._dataset.location(index)}: this image and the next {_MAX_REPLACEMENT_TRIES - 1} cannot be "
            "read; `facetrain data check` lists all damaged images of the dataset"
        )


def run_reader(connection: Connection, dataset: FaceDataset, slots: BatchSlots, skip_bad: bool) -> None:
    """Answer read requests until the training process closes the connection; the main function of a process."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    cv2.setNumThreads(0)  # there is one process per core already
    reader = ImageReader(dataset, slots, skip_bad=skip_bad)
    try:
        while True:
            connection.send(reader.read(connection.recv()))
    except (EOFError, ConnectionError):  # the training process closed the pool, or has ended
        return


def _picklable(error: Exception) -> Exception:
    """Return an exception that can be sent to another process, with its traceback as a note."""
    error.add_note("".join(traceback.format_exception(error)))
    if isinstance(error, FacetrainError):
        return error
    # Exception classes of libraries may not survive pickling.
    return RunError(f"reading failed: {type(error).__name__}: {error}")
