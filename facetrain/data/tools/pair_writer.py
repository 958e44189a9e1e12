"""Writer of verification sets: a `.bin`, and the tables and landmarks of its images beside it."""

# N images, two per pair   P pairs

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from facetrain.data.formats.bin import write_bin
from facetrain.data.formats.bin_tables import groups_path, remove_table, subjects_path, write_subjects
from facetrain.data.formats.landmark_file import landmarks_path, remove_landmarks, write_landmarks
from facetrain.data.images.decode import decode_rgb
from facetrain.data.skipped_files import SkippedFile, skipped_table
from facetrain.data.tools.aligned_images import NoFaceError
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.errors import PairsError, UnreadableError
from facetrain.files import os_errors_as, write_atomically
from facetrain.progress import ProgressCallback, ignore_progress


@dataclass(frozen=True)
class PairsToWrite:
    """Pairs of a verification set, with functions that read and name their images."""

    same: Sequence[bool]
    """Whether each pair shows one person."""
    read: Callable[[int], bytes]
    """Returns image 2p or 2p + 1 of pair p as it is written. Called from several threads. Raises UnreadableError for an
    image that evaluation could not read, see `require_readable`."""
    name: Callable[[int], str] = str
    """Returns the name of an image in the table of the pairs that are left out."""
    subjects: Sequence[str] | None = None
    """Person of each image, (N,); None if they are unknown."""
    group_lines: Sequence[str] | None = None
    """Lines of the table of groups: a header, and then one for each image or one for each pair."""
    landmarks_N52: np.ndarray | None = None


class WrittenPairs(NamedTuple):
    """Verification set that was written."""

    pairs: int
    same: int
    """Number of pairs of one person."""
    skipped: list[SkippedFile]
    """Images whose pairs were left out."""


def write_pairs(
    source: PairsToWrite,
    output: Path,
    *,
    skip_bad: bool = False,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> WrittenPairs:
    """Write a verification set; tables and landmarks of an older set of its name do not remain beside it.

    Args:
        source: the pairs.
        output: the .bin to write.
        skip_bad: leave out pairs with an image that cannot be read, and list these images in `skipped_path`.
        workers: number of threads; one per usable core if None.
        progress: called after every pair.

    Raises:
        UnreadableError: an image cannot be read, and `skip_bad` is false.
        PairsError: no pair is left, or a file cannot be written or removed.
        DataError: the landmarks cannot be written or removed.
    """
    is_written = np.zeros(len(source.same), bool)
    same: list[bool] = []
    skipped: dict[str, SkippedFile] = {}

    def read_pair(pair: int) -> tuple[bytes, bytes] | SkippedFile:
        images = []
        for number in (2 * pair, 2 * pair + 1):
            try:
                images.append(source.read(number))
            except UnreadableError as error:
                if not skip_bad:
                    raise type(error)(
                        f"{error}; leave out the pairs of such images with --skip-bad"
                    ) from error
                kind = "no_face" if isinstance(error, NoFaceError) else "unreadable"
                return SkippedFile(source.name(number), kind, str(error))
        return images[0], images[1]

    def images() -> Iterator[bytes]:
        pairs = map_in_order(read_pair, range(len(source.same)), workers)
        for pair, outcome in enumerate(report_progress(pairs, len(source.same), progress)):
            if isinstance(outcome, SkippedFile):
                skipped[outcome.name] = outcome
                continue
            is_written[pair] = True
            same.append(source.same[pair])
            yield from outcome
        if not same:
            raise PairsError(f"{output}: no pair is left; {next(iter(skipped.values())).reason}")
        # Tables of a removed set of this name. Not before: they stay if the reading fails.
        for path in (subjects_path, groups_path, skipped_path):
            remove_table(path(output))
        remove_landmarks(output)

    write_bin(output, images(), same)  # takes the flags after the last image
    is_written_N = np.repeat(is_written, 2)
    if source.subjects is not None:
        write_subjects(output, list(compress(source.subjects, is_written_N)))
    if source.landmarks_N52 is not None:
        write_landmarks(landmarks_path(output), source.landmarks_N52[is_written_N])
    if source.group_lines is not None:
        header, *rows = source.group_lines
        kept = compress(rows, is_written_N if len(rows) == len(is_written_N) else is_written)
        _write_text(groups_path(output), "\n".join([header, *kept, ""]))
    if skipped:
        _write_text(skipped_path(output), skipped_table(skipped.values()))
    return WrittenPairs(len(same), sum(same), list(skipped.values()))


def require_readable(data: bytes, location: str) -> bytes:
    """Return the bytes of an image after a check that evaluation can decode it.

    Raises:
        ImageError: it cannot.
    """
    decode_rgb(data, location=location)
    return data


def skipped_path(bin_path: Path) -> Path:
    """Return the path of the table with the images whose pairs were left out of a `.bin` file."""
    return bin_path.with_suffix(".skipped.csv")


def _write_text(path: Path, text: str) -> None:
    with os_errors_as(PairsError, path):
        write_atomically(path, text)
