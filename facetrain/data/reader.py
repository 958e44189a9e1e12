"""What a reading process does: fill rows of shared memory with decoded images. Imports no torch."""

from __future__ import annotations

import math
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import cv2
import numpy as np

from facetrain.data.dataset import FaceDataset
from facetrain.data.decode import NotAnImageError, decode, encoded_image_size, resize_square
from facetrain.data.shared_memory import SharedBytes
from facetrain.errors import DataError, FacetrainError, ImageError, RecordError, RunError

_TRIES = 100


@dataclass(frozen=True)
class Task:
    """Images to be put into rows `row`, `row + 1`, … of a slot."""

    slot: int
    row: int
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Done:
    """The answer to a task: the error that stopped it, or the bad records that gave way to others."""

    task: Task
    error: Exception | None = None
    skipped: Sequence[str] = ()


class Slots:
    """Room for the images of several steps, and for the numbers of the images that stand there.

    Where `encoded` is not 0, a row begins with so many bytes of a JPEG instead of pixels.
    """

    def __init__(self, slots: int, rows: int, image_size: int) -> None:
        self._shape = (slots, rows, image_size, image_size, 3)
        self._bytes = SharedBytes(16 * slots * rows + math.prod(self._shape))
        self._look()

    def _look(self) -> None:
        slots, rows = self._shape[:2]
        self.number = self._bytes.array((slots, rows), np.int64)
        self.encoded = self._bytes.array((slots, rows), np.int64, offset=8 * slots * rows)
        self.image = self._bytes.array(self._shape, np.uint8, offset=16 * slots * rows)

    def __getstate__(self) -> tuple[tuple[int, ...], SharedBytes]:
        """Travel as the shared memory itself."""
        return self._shape, self._bytes

    def __setstate__(self, state: tuple[tuple[int, int, int, int, int], SharedBytes]) -> None:
        """Look at the same memory from another process."""
        self._shape, self._bytes = state
        self._look()


class Filler:
    """Reads, decodes and resizes; says of a bad image that it is bad, or goes on to the next good one.

    With `leave_jpeg`, a JPEG that needs no resizing stays as it is, for the device to decode.
    """

    def __init__(self, source: FaceDataset, slots: Slots, *, skip: bool, leave_jpeg: bool = False) -> None:
        self._source, self._slots, self._skip, self._leave_jpeg = source, slots, skip, leave_jpeg
        self._size = slots.image.shape[2]

    def fill(self, task: Task) -> Done:
        """Do a task; whatever goes wrong is in the answer."""
        skipped: list[str] = []
        image, stands = self._slots.image[task.slot], self._slots.number[task.slot]
        encoded = self._slots.encoded[task.slot]
        stands[task.row : task.row + len(task.numbers)] = task.numbers
        encoded[task.row : task.row + len(task.numbers)] = 0
        row = task.row
        try:
            for row, number in enumerate(task.numbers, task.row):
                try:
                    if self._leave_jpeg and (data := self._fitting_jpeg(number)):
                        image[row].reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
                        encoded[row] = len(data)
                    else:
                        image[row] = self._load(number)
                except (ImageError, RecordError) as error:
                    if not self._skip:
                        raise
                    skipped.append(str(error))
                    image[row], stands[row] = self._next_good(number, skipped)
        except Exception as error:  # it belongs to the training process, whatever it is
            return Done(task, _portable(error), skipped)
        return Done(task, None, skipped)

    def _fitting_jpeg(self, number: int) -> bytes | None:
        """Return an image as it is encoded if a device can make pixels of the right size of it."""
        data = self._source.read(number)
        fits = encoded_image_size(data) == (self._size, self._size) and len(data) <= 3 * self._size**2
        whole = data[:2] == b"\xff\xd8" and data.rfind(b"\xff\xd9") > 0
        return data if fits and whole else None

    def _load(self, number: int) -> np.ndarray:
        try:
            return resize_square(decode(self._source.read(number)), self._size)
        except NotAnImageError as refused:
            raise ImageError(f"{self._source.location(number)}: {refused}") from None

    def _next_good(self, number: int, skipped: list[str]) -> tuple[np.ndarray, int]:
        # Of the numbers that follow, the first that can be decoded: the same for any number of ranks.
        for step in range(1, _TRIES):
            other = (number + step) % self._source.num_images
            try:
                return self._load(other), other
            except (ImageError, RecordError) as error:
                skipped.append(str(error))
        raise DataError(
            f"{self._source.location(number)}: this image and the {_TRIES - 1} after it cannot be decoded; "
            "`facetrain data check` lists what is wrong with the dataset"
        )


def serve(connection: Connection, source: FaceDataset, slots: Slots, skip: bool, leave_jpeg: bool) -> None:
    """Do tasks until the training process hangs up."""
    # Ctrl-C and a preemption's SIGTERM reach the whole group of processes. What they mean is for the
    # training process to decide; it still needs batches up to its last checkpoint.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    cv2.setNumThreads(0)  # the processes are the parallelism
    filler = Filler(source, slots, skip=skip, leave_jpeg=leave_jpeg)
    try:
        while True:
            connection.send(filler.fill(connection.recv()))
    except (EOFError, ConnectionError):
        return


def _portable(error: Exception) -> Exception:
    """Return the error as it can travel to another process, with the traceback it had here."""
    error.add_note("".join(traceback.format_exception(error)))
    if isinstance(error, FacetrainError):
        return error
    # An exception class of a library need not come back from a pickle as it was.
    return RunError(f"reading failed: {type(error).__name__}: {error}")
