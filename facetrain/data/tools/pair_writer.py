"""Writer of verification sets: a `.bin`, and the tables and landmarks of its images beside it."""

# N images, two per pair   P pairs

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.dataset import FaceDataset
from facetrain.data.formats.bin import write_bin
from facetrain.data.formats.bin_tables import groups_path, subjects_path, write_subjects
from facetrain.data.formats.landmark_file import landmarks_path, write_landmarks
from facetrain.data.formats.set_names import NAME_ENDINGS, set_name
from facetrain.data.images.decode import decode_rgb
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.errors import PairsError
from facetrain.files import os_errors_as, require_absent, write_atomically
from facetrain.progress import ProgressCallback, ignore_progress


@dataclass(frozen=True)
class PairsToWrite:
    """Pairs of a verification set, with a function that reads their images."""

    same: Sequence[bool]
    """Whether each pair shows one person."""
    read: Callable[[int], bytes]
    """Returns image 2p or 2p + 1 of pair p as it is written. Called from several threads. Raises UnreadableError for an
    image that evaluation could not read, see `require_readable`."""
    subjects: Sequence[str] | None = None
    """Person of each image, (N,); None if they are unknown."""
    groups: str | None = None
    """Table of groups: a header, and then a line for each image or for each pair."""
    landmarks_N52: np.ndarray | None = None
    remark: str = ""
    """What is doubtful about the pairs, for a warning."""


def write_pairs(
    source: PairsToWrite,
    output: Path,
    *,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> None:
    """Write a verification set; tables and landmarks of an older set of its name do not remain beside it.

    Args:
        source: the pairs.
        output: the .bin to write.
        workers: number of threads; one per usable core if None.
        progress: called after every image.

    Raises:
        UnreadableError: an image cannot be read.
        PairsError: a file cannot be written or removed.
        DataError: the landmarks cannot be written.
    """
    count = 2 * len(source.same)

    def images() -> Iterator[bytes]:
        yield from report_progress(map_in_order(source.read, range(count), workers), count, progress)
        # Not before: an older set stays if the reading fails. The .bin goes first and comes last: whenever the command
        # is killed, no set has the tables of another one, or lacks its own.
        for path in _files_of(output):
            with os_errors_as(PairsError, path):
                path.unlink(missing_ok=True)
        _write_tables(source, output)

    write_bin(output, images(), source.same)


def require_new_set(output: Path) -> None:
    """Check that there is no set of the name of a `.bin` to write, and no file that would become a part of it.

    Raises:
        DataError: there is one.
    """
    for path in (
        *_files_of(output),
        *(output.with_name(set_name(output) + ending) for ending in NAME_ENDINGS),
    ):
        require_absent(path)


def _files_of(output: Path) -> tuple[Path, ...]:
    """Return the paths of a `.bin`, its tables and its landmarks."""
    return output, subjects_path(output), groups_path(output), landmarks_path(output)


def _write_tables(source: PairsToWrite, output: Path) -> None:
    if source.subjects is not None:
        write_subjects(output, source.subjects)
    if source.landmarks_N52 is not None:
        write_landmarks(landmarks_path(output), source.landmarks_N52)
    if source.groups is not None:
        with os_errors_as(PairsError, groups_path(output)):
            write_atomically(groups_path(output), source.groups)


def pairs_of_dataset(
    source: FaceDataset, same: Sequence[bool], pairs: Iterable[tuple[int, int]]
) -> PairsToWrite:
    """Return pairs of a dataset's images, given by their numbers, with their people and landmarks."""
    numbers = [number for pair in pairs for number in pair]
    read_landmarks = source.landmark_reader()
    return PairsToWrite(
        same,
        lambda row: require_readable(source.read(numbers[row]), source.location(numbers[row])),
        subjects=[str(identity) for identity in source.labels[numbers].tolist()],
        landmarks_N52=None if read_landmarks is None else read_landmarks(np.array(numbers, np.int64)),
    )


def require_readable(data: bytes, location: str) -> bytes:
    """Return the bytes of an image after a check that evaluation can decode it.

    Raises:
        ImageError: it cannot.
    """
    decode_rgb(data, location=location)
    return data
