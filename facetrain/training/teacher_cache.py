"""File with the embeddings that a teacher has for a dataset, mapped into memory.

A safetensors file with two tensors. `embedding` is float32 (N, R, T): row 0 is the embedding of an image, row 1, if
there is one, the embedding of its mirror image; neither has length 1. `checksum` is uint32 (N, R), the CRC-32 of each
row: a damaged row is found when it is read, because to read a whole file at every start would take minutes. The
metadata has the digests of the labels, of some images and of the landmarks of the dataset, and of the teacher.
"""

# B local batch   N images   R rows of an image, 1 or 2   T embedding of the teacher   C classes

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.checkpoint.tensor_file import file_header
from facetrain.data.loading.loader import Batch
from facetrain.device.page_locked import to_device
from facetrain.errors import DataError
from facetrain.files import new_file, os_errors_as

_LARGEST_HEADER = 1 << 16
_ROWS_PER_READ = 1 << 14
DIGESTS = {
    "dataset": "another dataset",
    "samples": "other images",
    "landmarks": "other landmarks",
    "teacher": "another teacher",
}
"""Digests in the metadata, by their keys: what differs if one differs."""
_ADVICE = "write it again: facetrain embed TEACHER DATASET --output FILE.safetensors"


@contextmanager
def new_cache(
    path: Path, shape: tuple[int, int, int], digests: dict[str, str]
) -> Iterator[Callable[[int, np.ndarray], None]]:
    """Yield a function that writes rows of a new cache (N, R, T): it takes the first image and float32 (B, R, T).

    The file appears when the block ends without an error; the caller has then written all rows. `digests` are those of
    the dataset and the teacher, by the keys of `DIGESTS`.

    Raises:
        DataError: the file cannot be written.
    """
    tensors = {
        "embedding": torch.empty(shape, dtype=torch.float32, device="meta"),
        "checksum": torch.empty(shape[:2], dtype=torch.uint32, device="meta"),
    }
    header = file_header(tensors, digests)
    size, checksums_size = (tensor.nbytes for tensor in tensors.values())
    with new_file(path, DataError) as scratch, scratch.open("wb") as file:

        def write(first: int, row_BRT: np.ndarray) -> None:
            for start, array in ((0, row_BRT), (size, _checksums(row_BRT))):
                file.seek(len(header) + start + first * array[0].nbytes)
                file.write(np.ascontiguousarray(array).data)

        # A full disk is reported now and not after hours.
        os.posix_fallocate(file.fileno(), 0, len(header) + size + checksums_size)
        file.write(header)
        yield write
        file.flush()
        os.fsync(file.fileno())


class CachedTeacher:
    """Teacher whose embeddings were computed before, for the images without augmentations other than the flip."""

    def __init__(
        self,
        path: Path,
        *,
        digests: dict[str, str],
        num_images: int,
        index: np.ndarray | None = None,
        flips: Callable[[Tensor, int], Tensor | None],
        needs_mirrored: bool,
    ) -> None:
        """Map a cache into memory.

        Args:
            path: the file.
            digests: digests of the dataset and the teacher, see `new_cache`; one that is left out is not compared.
            num_images: number of images of the dataset.
            index: number in the dataset of each image of the training data, int64 (N,); None: all in their order.
            flips: returns which samples of an epoch are mirrored, bool (B,); None: none is.
            needs_mirrored: whether images may be mirrored.

        Raises:
            DataError: it is not such a file, or belongs to another dataset or another teacher.
        """
        self._path = path
        self._rows_NRT, self._checksum_NR, written = _open(path)
        self._flips, self.digest, self._index = flips, written["teacher"], index
        self._needs_mirrored = needs_mirrored
        rows, self.embedding_size = self._rows_NRT.shape[1:]
        others = [DIGESTS[name] for name, digest in digests.items() if written[name] != digest]
        if not others and len(self._rows_NRT) != num_images:
            others = [DIGESTS["dataset"]]
        if others:
            raise DataError(f"{path}: was written for {' and '.join(others)}; {_ADVICE}")
        if needs_mirrored and rows < 2:
            raise DataError(
                f"{path}: has no embeddings of mirrored images, and data.augment.flip is above 0; {_ADVICE}"
            )

    def __call__(self, batch: Batch, image_BCHW: Tensor) -> Tensor:
        """Return the embeddings (B, T), float32, on the device of the images.

        Raises:
            DataError: one of them is damaged.
        """
        # The flip of a replaced image is drawn with the index of the bad one, as for its pixels.
        flip_B = self._flips(batch.draw_B, batch.epoch)
        read_B = batch.read_B.numpy()
        image_B = read_B if self._index is None else self._index[read_B]
        row_B = 0 if flip_B is None else flip_B.numpy().astype(np.int64)
        # A copy of these rows; its pages are read from the disk if they are not in memory.
        row_BT = np.ascontiguousarray(self._rows_NRT[image_B, row_B])
        self._check(image_B, row_BT[:, None], self._checksum_NR[image_B, row_B][:, None])
        return to_device(row_BT, image_BCHW.device)

    def mean_embeddings(self, labels: np.ndarray, start: int, stop: int, *, into: Tensor) -> None:
        """Write the means of the unit embeddings of classes [start, stop) into the rows of a table (stop - start, T).

        `labels` belong to the training data. The embeddings of the mirror images count too if images may be
        mirrored. The row of a class without images stays as it is.
        """
        rows = 2 if self._needs_mirrored else 1
        # An identity can have thousands of rows.
        sum_CT = torch.zeros(stop - start, self.embedding_size, dtype=torch.float64)
        sample_N = np.flatnonzero((labels >= start) & (labels < stop))
        for begin in range(0, len(sample_N), _ROWS_PER_READ):
            sample_B = sample_N[begin : begin + _ROWS_PER_READ]
            image_B = sample_B if self._index is None else self._index[sample_B]
            row_BRT = np.ascontiguousarray(self._rows_NRT[image_B, :rows])
            self._check(image_B, row_BRT, self._checksum_NR[image_B, :rows])
            # Of unit embeddings, because the head compares directions: a long embedding counts as much as a short one.
            unit_BRT = F.normalize(torch.from_numpy(row_BRT), dim=2)
            sum_CT.index_add_(0, torch.from_numpy(labels[sample_B] - start).long(), unit_BRT.double().sum(1))
        count_C = torch.from_numpy(np.bincount(labels[sample_N] - start, minlength=stop - start))
        has_images_C1 = (count_C > 0)[:, None]
        mean_CT = sum_CT / (rows * count_C.clamp_min(1))[:, None]
        into.copy_(torch.where(has_images_C1, mean_CT, into.cpu().double()))

    def _check(self, image_B: np.ndarray, row_BRT: np.ndarray, checksum_BR: np.ndarray) -> None:
        """Raise DataError if a row of the images does not have its checksum."""
        damaged = np.flatnonzero((_checksums(row_BRT) != checksum_BR).any(axis=1))
        if len(damaged):
            raise DataError(
                f"{self._path}: the embedding of image {image_B[damaged[0]]:,} is damaged; {_ADVICE}"
            )


def cache_digest(path: Path) -> str:
    """Return a digest of the embeddings in a cache, from their checksums.

    Raises:
        DataError: the file is not one of `new_cache`.
    """
    return hashlib.sha256(_open(path)[1].tobytes()).hexdigest()[:32]


def cached_embedding_size(path: Path) -> int:
    """Return the length of the embeddings in a cache.

    Raises:
        DataError: the file is not one of `new_cache`.
    """
    return int(_open(path)[0].shape[2])


def _checksums(row_BRT: np.ndarray) -> np.ndarray:
    """Return the CRC-32 of each row of float32 (B, R, T): uint32 (B, R)."""
    # Of a row of 512 numbers in 2 microseconds: less than a thousandth of the time of its image in a step.
    checksums = [[zlib.crc32(row) for row in rows] for rows in row_BRT]
    return np.array(checksums, np.uint32).reshape(row_BRT.shape[:2])


def _open(path: Path) -> tuple[np.ndarray, np.ndarray, dict[str, str]]:
    """Return the embeddings and their checksums, mapped into memory, and the digests.

    Raises:
        DataError: the file is not one of `new_cache`.
    """
    with os_errors_as(DataError, path, _ADVICE), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # A damaged length must not fill the memory.
        text = file.read(length) if length <= _LARGEST_HEADER else b""
        size = path.stat().st_size
    try:
        header = json.loads(text)
        tensor, metadata = header["embedding"], header["__metadata__"]
        shape = tuple(int(number) for number in tensor["shape"])
        digests = {name: str(metadata[name]) for name in DIGESTS}
        sound = tensor["dtype"] == "F32" and len(shape) == 3 and shape[1] in (1, 2) and min(shape) > 0
        sound = sound and header["checksum"]["dtype"] == "U32"
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        sound, shape, digests = False, (), {}
    # In Python's integers: the product of a damaged shape would overflow.
    start, rows_end = 8 + length, 8 + length + int(np.prod(shape, dtype=object)) * 4
    if not sound or rows_end + shape[0] * shape[1] * 4 != size:
        raise DataError(f"{path}: not a complete file of a teacher's embeddings; {_ADVICE}")
    checksum_NR = np.memmap(path, np.uint32, "r", rows_end, shape[:2])
    return np.memmap(path, np.float32, "r", start, shape), checksum_NR, digests
