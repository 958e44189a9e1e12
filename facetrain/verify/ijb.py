"""IJB-B and IJB-C as InsightFace hands them out: `meta/` with the official lists, `loose_crop/` with the faces.

    meta/ijbc_face_tid_mid.txt          image template medium
    meta/ijbc_name_5pts_score.txt       image x1 y1 … x5 y5 score     the same images in the same order
    meta/ijbc_template_pair_label.txt   template template 1|0
    meta/ijbc_1N_gallery_G1.csv, …G2    TEMPLATE_ID,SUBJECT_ID,…        a line per image or frame
    meta/ijbc_1N_probe_mixed.csv        TEMPLATE_ID,SUBJECT_ID,…

IJB-B's files begin with `ijbb`, and its galleries end in S1 and S2. The 1:N files may be missing.
"""

# N images   P pairs   T templates

from __future__ import annotations

import csv
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.align import align
from facetrain.errors import PairsError
from facetrain.verify.lazy_files import LazyFiles


@dataclass(frozen=True)
class TemplateSubjects:
    """Templates and whose they are: int (T,) each, ascending by template."""

    template: np.ndarray
    subject: np.ndarray


@dataclass(frozen=True)
class IjbSet:
    """The lists of one of the two sets, and where its images lie."""

    name: str
    images: Path
    names: list[str]
    landmarks: np.ndarray
    """float32 (N, 5, 2), in pixels of the loose crop."""
    detection: np.ndarray
    """The detector's score of each image, float32 (N,)."""
    template: np.ndarray
    medium: np.ndarray
    first: np.ndarray
    """Templates of the pairs, int (P,)."""
    second: np.ndarray
    same: np.ndarray
    galleries: dict[str, TemplateSubjects]
    """The galleries of the 1:N protocol, by the end of their file's name."""
    probes: TemplateSubjects | None

    @property
    def encoded(self) -> Sequence[bytes]:
        """The loose crops, each read when it is asked for."""
        return LazyFiles([self.images / name for name in self.names])

    def crop(self, image: np.ndarray, number: int, size: int) -> np.ndarray:
        """Align the face of a loose crop."""
        return align(image, self.landmarks[number], size)


def is_ijb(folder: Path) -> bool:
    """Whether a folder has the lists of IJB-B or IJB-C."""
    return any((folder / "meta").glob("*_face_tid_mid.txt"))


def open_ijb(folder: Path, name: str) -> IjbSet:
    """Read the lists of IJB-B or IJB-C.

    Raises:
        PairsError: a list is missing or wrong; the message has the file, and the line where it can.
    """
    meta = folder / "meta"
    faces = next(iter(sorted(meta.glob("*_face_tid_mid.txt"))), meta / f"{name}_face_tid_mid.txt")
    prefix = faces.name.removesuffix("_face_tid_mid.txt")
    listed, template_medium = _named_rows(faces, 2)
    names, points = _named_rows(meta / f"{prefix}_name_5pts_score.txt", 11)
    if names != listed:
        at = next((i for i, pair in enumerate(zip(names, listed, strict=False)) if len(set(pair)) > 1), None)
        where = f"line {at + 1}" if at is not None else f"{len(names):,} and {len(listed):,} lines"
        raise PairsError(f"{meta}: {faces.name} and {prefix}_name_5pts_score.txt list other images: {where}")
    pairs = read_pair_list(meta / f"{prefix}_template_pair_label.txt")
    template = template_medium[:, 0].astype(np.int64)
    _check_known(template, pairs[:, :2], meta / f"{prefix}_template_pair_label.txt")
    galleries, probes = _rosters(meta, prefix, template)
    return IjbSet(
        name=name,
        images=folder / "loose_crop",
        names=names,
        landmarks=points[:, :10].reshape(-1, 5, 2).astype(np.float32),
        detection=points[:, 10].astype(np.float32),
        template=template,
        medium=template_medium[:, 1].astype(np.int64),
        first=pairs[:, 0],
        second=pairs[:, 1],
        same=pairs[:, 2] == 1,
        galleries=galleries,
        probes=probes,
    )


def _named_rows(path: Path, numbers: int) -> tuple[list[str], np.ndarray]:
    """Read lines of a name and some numbers: the names, float64 (N, numbers)."""
    names: list[str] = []
    rows: list[list[str]] = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        name, *rest = line.split()
        if len(rest) != numbers:
            raise PairsError(f"{path}, line {number}: {len(rest)} numbers after the name, not {numbers}")
        names.append(name)
        rows.append(rest)
    try:
        return names, np.array(rows, dtype=np.float64).reshape(-1, numbers)
    except ValueError as error:
        raise PairsError(f"{path}: {error}") from None


def read_pair_list(path: Path) -> np.ndarray:
    """Read lines of two templates and a label, int64 (P, 3); IJB-C has 15.7 million."""
    _require(path)
    with warnings.catch_warnings():
        # What is no number ends the reading with no more than a warning.
        warnings.simplefilter("error", DeprecationWarning)
        try:
            flat = np.fromfile(path, dtype=np.int64, sep=" ")
        except (ValueError, DeprecationWarning):
            flat = np.empty(1, np.int64)
    if len(flat) % 3 or not len(flat):
        raise PairsError(f"{path}{_first_wrong(path)}: not `template template 1` nor `template template 0`")
    pairs_P3 = flat.reshape(-1, 3)
    if not np.isin(pairs_P3[:, 2], (0, 1)).all():
        at = int(np.flatnonzero((pairs_P3[:, 2] != 0) & (pairs_P3[:, 2] != 1))[0])
        raise PairsError(f"{path}, line {at + 1}: the label is {pairs_P3[at, 2]}, neither 1 nor 0")
    return pairs_P3


def _first_wrong(path: Path) -> str:
    for number, line in enumerate(_text(path).splitlines(), start=1):
        words = line.split()
        if len(words) != 3 or not all(word.lstrip("-").isdigit() for word in words):
            return f", line {number}"
    return ""


def _rosters(
    meta: Path, prefix: str, template: np.ndarray
) -> tuple[dict[str, TemplateSubjects], TemplateSubjects | None]:
    start = f"{prefix}_1N_gallery_"
    galleries = {
        path.stem.removeprefix(start): _roster(path, template) for path in sorted(meta.glob(f"{start}*.csv"))
    }
    probes = meta / f"{prefix}_1N_probe_mixed.csv"
    return galleries, _roster(probes, template) if galleries and probes.is_file() else None


def _roster(path: Path, template: np.ndarray) -> TemplateSubjects:
    rows = list(csv.reader(_text(path).splitlines()))[1:]
    try:
        owner = {int(row[0]): int(row[1]) for row in rows if row}
    except (ValueError, IndexError) as error:
        raise PairsError(f"{path}: a line does not begin with TEMPLATE_ID,SUBJECT_ID ({error})") from None
    ids = np.array(sorted(owner), np.int64)
    _check_known(template, ids, path)
    return TemplateSubjects(ids, np.array([owner[int(number)] for number in ids], np.int64))


def _check_known(template: np.ndarray, asked: np.ndarray, path: Path) -> None:
    unknown = np.setdiff1d(asked, template)
    if len(unknown):
        raise PairsError(f"{path}: {len(unknown):,} templates have no image, among them {unknown[0]}")


def _require(path: Path) -> None:
    if not path.is_file():
        raise PairsError(f"{path}: there is no such list; docs/evaluation.md says which files the set needs")


def _text(path: Path) -> str:
    _require(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PairsError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
