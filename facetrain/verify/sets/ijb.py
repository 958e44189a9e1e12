"""IJB-B and IJB-C in InsightFace's layout: `meta/` with the lists, `loose_crop/` with the images.

    meta/ijbc_face_tid_mid.txt          image template medium
    meta/ijbc_name_5pts_score.txt       image x1 y1 … x5 y5 score     the same images in the same order
    meta/ijbc_template_pair_label.txt   template template 1|0
    meta/ijbc_1N_gallery_G1.csv, …G2    TEMPLATE_ID,SUBJECT_ID,…        one line per image or frame
    meta/ijbc_1N_probe_mixed.csv        TEMPLATE_ID,SUBJECT_ID,…

The files of IJB-B begin with `ijbb`, and its galleries end in S1 and S2. The 1:N files are optional.
The protocols are from Whitelam et al., "IARPA Janus Benchmark-B face dataset", 2017, and Maze et al.,
"IARPA Janus Benchmark-C: face dataset and protocol", 2018.
"""

# N images   P pairs   T templates

from __future__ import annotations

import csv
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from facetrain.data.images.align import align, aligned_landmarks
from facetrain.distinct import distinct
from facetrain.embeddings.image_inputs import LazySequence, lazy_files
from facetrain.errors import PairsError
from facetrain.face_landmarks import TEMPLATE_SIZE, normalize_landmarks
from facetrain.files import error_reason
from facetrain.strict_csv import csv_rows
from facetrain.text import count_text, listed
from facetrain.verify.sets.csv_columns import plain_number

_LABELED_PAIR = re.compile(r"\s*-?[0-9]+\s+-?[0-9]+\s+[01]\s*")
_TEMPLATE = re.compile(r"\s*-?[0-9]+\s*,\s*-?[0-9]+\s*(,|$)")
_LIMIT = 1 << 63
"""Numbers of a list are smaller: the ids fit into int64, and the other numbers into float32."""


@dataclass(frozen=True)
class TemplateSubjects:
    """Templates of a gallery or of the probes, with their subjects."""

    template: np.ndarray
    """Template ids, int (T,) ascending."""
    subject: np.ndarray
    """Subject number of each template, int (T,)."""


@dataclass(frozen=True)
class IjbSet:
    """Lists of IJB-B or IJB-C, and the folder of the images."""

    name: str
    images: Path
    """Folder of the loose crops."""
    names: list[str]
    """File names of the N images."""
    landmarks: np.ndarray
    """Five landmarks of each face in pixels of the loose crop, float32 (N, 5, 2)."""
    detection: np.ndarray
    """Detector score of each image, float32 (N,)."""
    template: np.ndarray
    """Template id of each image, int64 (N,)."""
    medium: np.ndarray
    """Medium id of each image, int64 (N,)."""
    first: np.ndarray
    second: np.ndarray
    """Template ids of the pairs of the 1:1 protocol, int64 (P,)."""
    same: np.ndarray
    """True for a genuine pair, bool (P,)."""
    galleries: dict[str, TemplateSubjects]
    """Galleries of the 1:N protocol by the end of the file name, such as `G1`."""
    probes: TemplateSubjects | None
    """Mixed probes of the 1:N protocol; None if the list does not exist."""

    @property
    def search_name(self) -> str:
        """Name of the result of the 1:N protocol."""
        return f"{self.name}_1n"

    @property
    def encoded(self) -> Sequence[bytes]:
        """Encoded loose crops, read from disk on access."""
        return lazy_files([self.images / name for name in self.names])

    def crop(self, image: np.ndarray, index: int, size: int) -> np.ndarray:
        """Align the face of loose crop `index`: uint8 (H, W, 3) -> uint8 (size, size, 3)."""
        return align(image, self.landmarks[index], size)

    @property
    def aligned_landmarks(self) -> LazySequence[np.ndarray]:
        """Landmarks of the aligned faces, computed on access: (5, 2) each, as fractions of the sides."""

        def aligned(index: int) -> np.ndarray:
            points = aligned_landmarks(self.landmarks[index], TEMPLATE_SIZE)
            return normalize_landmarks(points, TEMPLATE_SIZE, TEMPLATE_SIZE)

        return LazySequence(len(self.landmarks), aligned)


def open_ijb(folder: Path, name: str) -> IjbSet | None:
    """Read the lists of IJB-B or IJB-C; return None for a folder without them.

    Raises:
        PairsError: a list is missing or damaged; the message names the file and, if possible, the line.
    """
    meta = folder / "meta"
    # Not ._NAME, which macOS writes beside a file.
    faces = next(iter(sorted(meta.glob("[!.]*_face_tid_mid.txt"))), None)
    if faces is None:
        return None
    prefix = faces.name.removesuffix("_face_tid_mid.txt")
    listed, template_medium = _named_rows(faces, 2, int)
    names, points = _named_rows(meta / f"{prefix}_name_5pts_score.txt", 11, float)
    # A missing line in one list would give every later image the landmarks of another one.
    if names != listed:
        line = next(n for n, (one, other) in enumerate(zip_longest(names, listed), 1) if one != other)
        raise PairsError(
            f"{meta}: {faces.name} and {prefix}_name_5pts_score.txt must list the same images in the same order, but "
            f"differ: line {line}"
        )
    pairs = read_pair_list(meta / f"{prefix}_template_pair_label.txt")
    template = template_medium[:, 0]
    _check_known(template, pairs[:, :2], meta / f"{prefix}_template_pair_label.txt")
    galleries, probes = _read_one_to_many(meta, prefix, template)
    _require_images(folder / "loose_crop", names)
    return IjbSet(
        name=name,
        images=folder / "loose_crop",
        names=names,
        landmarks=points[:, :10].reshape(-1, 5, 2),
        detection=points[:, 10],
        template=template,
        medium=template_medium[:, 1],
        first=pairs[:, 0],
        second=pairs[:, 1],
        same=pairs[:, 2] == 1,
        galleries=galleries,
        probes=probes,
    )


def _named_rows(path: Path, count: int, kind: type[int] | type[float]) -> tuple[list[str], np.ndarray]:
    """Read lines of a file name and `count` numbers; return the names and int64 or float32 (N, count)."""
    names: list[str] = []
    rows: list[list[float]] = []
    for line, text in enumerate(_text(path).splitlines(), start=1):
        name, *words = text.split() or [""]
        try:
            row = [plain_number(word, kind) for word in words]
        except ValueError:
            row = []
        # The comparison is false for NaN.
        if len(row) != count or not all(abs(number) < _LIMIT for number in row):
            raise PairsError(
                f"{path}, line {line}: expected a file name and {count} numbers ({kind.__name__}); correct the line "
                "or download the list again"
            )
        names.append(name)
        rows.append(row)
    return names, np.array(rows, np.int64 if kind is int else np.float32).reshape(-1, count)


def read_pair_list(path: Path) -> np.ndarray:
    """Read lines of two template ids and a label: int64 (P, 3).

    IJB-C has 15.7 million lines: np.fromfile reads them in seconds, Python code would take minutes.

    Raises:
        PairsError: the file does not exist, or a line is not of this form.
    """
    _require(path)
    with warnings.catch_warnings():
        # np.fromfile stops at text that is not a number, with nothing but this warning.
        warnings.simplefilter("error", DeprecationWarning)
        try:
            flat = np.fromfile(path, dtype=np.int64, sep=" ")
        except (OSError, ValueError, DeprecationWarning):  # `_text` or the line below says why
            flat = np.empty(1, np.int64)
    pairs_P3 = flat.reshape(-1, 3) if len(flat) % 3 == 0 else np.empty((0, 3), np.int64)
    if not len(pairs_P3) or not np.isin(pairs_P3[:, 2], (0, 1)).all():
        lines = enumerate(_text(path).splitlines(), start=1)
        wrong = next((f", line {line}" for line, text in lines if not _LABELED_PAIR.fullmatch(text)), "")
        raise PairsError(
            f"{path}{wrong}: expected `template template label` with integers and the label 0 or 1"
        )
    return pairs_P3


def _read_one_to_many(
    meta: Path, prefix: str, template: np.ndarray
) -> tuple[dict[str, TemplateSubjects], TemplateSubjects | None]:
    start = f"{prefix}_1N_gallery_"
    galleries = {
        path.stem.removeprefix(start): _read_template_subjects(path, template)
        for path in sorted(meta.glob(f"{start}*.csv"))
    }
    probes = meta / f"{prefix}_1N_probe_mixed.csv"
    return galleries, _read_template_subjects(probes, template) if galleries and probes.is_file() else None


def _read_template_subjects(path: Path, template: np.ndarray) -> TemplateSubjects:
    try:
        rows = list(csv_rows(_text(path).splitlines()))
    except csv.Error as error:
        raise PairsError(f"{path}, {error}") from None
    if rows and _TEMPLATE.match(",".join(rows[0][1])):
        raise PairsError(
            f"{path}, line {rows[0][0]}: is a template, but must name the columns; add a line TEMPLATE_ID,SUBJECT_ID"
        )
    subject_of: dict[int, int] = {}
    for line, row in rows[1:]:
        try:
            # Through int64: a larger number raises an error here and not later.
            numbers = np.array([plain_number(field, int) for field in row[:2]], np.int64)
            template_id, subject = numbers.tolist()
            if subject_of.setdefault(template_id, subject) != subject:
                raise ValueError(f"template {template_id} has the subject {subject_of[template_id]} before")
        except (ValueError, OverflowError) as error:
            raise PairsError(
                f"{path}, line {line}: every line after the header must begin with TEMPLATE_ID,SUBJECT_ID as "
                f"integers, with one subject for each template ({error_reason(error)})"
            ) from None
    if not subject_of:
        raise PairsError(
            f"{path}: the list has no templates; download it again, or remove the files `*_1N_*.csv` to evaluate "
            "without the 1:N protocol"
        )
    ids = np.array(sorted(subject_of), np.int64)
    _check_known(template, ids, path)
    return TemplateSubjects(ids, np.array([subject_of[number] for number in ids.tolist()], np.int64))


def _check_known(template: np.ndarray, listed: np.ndarray, path: Path) -> None:
    """Check that every listed template has an image."""
    unknown = np.setdiff1d(distinct(listed.ravel()), template)
    if len(unknown):
        raise PairsError(
            f"{path}: {count_text(len(unknown), 'template has', 'templates have')} no image, among them template "
            f"{unknown[0]}"
        )


def _require_images(folder: Path, names: Sequence[str]) -> None:
    """Check that the folder of the images is complete: embedding them takes hours."""
    try:
        present = set(os.listdir(folder))
    except OSError as error:
        raise PairsError(f"{folder}: {error_reason(error)}; unpack the images of the set there") from error
    missing = [name for name in names if name not in present and not os.path.isfile(folder / name)]
    if missing:
        raise PairsError(
            f"{folder}: {count_text(len(missing), 'image is', 'images are')} missing: {listed(missing)}; unpack "
            "the images of the set again"
        )


def _require(path: Path) -> None:
    if not path.is_file():
        raise PairsError(f"{path}: no such file; docs/evaluation.md lists the files of the set")


def _text(path: Path) -> str:
    _require(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PairsError(f"{path}: {error_reason(error)}") from error
