"""Evaluation set for identification: TinyFace.

Gallery_Match/  Gallery_Distractor/  Probe/                 TinyFace's Testing_Set, original or aligned images
gallery_match_img_ID_pairs.mat  probe_img_ID_pairs.mat      subject lists, in that folder or its parent; without
them, `7_2.jpg` is an image of subject 7
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.images.header import IMAGE_SUFFIXES
from facetrain.embeddings.dense_ids import dense_ids
from facetrain.errors import PairsError
from facetrain.files import error_reason
from facetrain.verify.sets.lazy_files import lazy_files

_SUBJECT_NUMBER = re.compile(r"[0-9]{1,18}")
"""Number of a subject at the beginning of a file name of TinyFace."""


@dataclass(frozen=True)
class SearchSet:
    """Probes, and the gallery in which they are searched."""

    name: str
    probes: Sequence[bytes]
    probe_subject: np.ndarray
    """Subject id of each probe, int from 0."""
    gallery: Sequence[bytes]
    gallery_subject: np.ndarray
    """Subject id of each gallery image; −1 for a distractor: matches no probe."""


def open_tinyface(folder: Path, name: str) -> SearchSet | None:
    """List the probes and the gallery of TinyFace (Cheng, Zhu and Gong, "Low-resolution face recognition", 2018).

    Return None for a folder of another layout.

    Raises:
        PairsError: a list cannot be read, or a file name does not begin with a subject number.
    """
    roots = (folder, folder / "Testing_Set", folder / "tinyface" / "Testing_Set")
    root = next((one for one in roots if _has(one, "Gallery_Match", "Probe")), None)
    if root is None:
        return None
    matches, match_subjects = _labeled_images(root, "Gallery_Match", "gallery_match", "gallery")
    probes, probe_subjects = _labeled_images(root, "Probe", "probe", "probe")
    distractors = _images(root / "Gallery_Distractor")
    subject = dense_ids([*probe_subjects, *match_subjects])
    return SearchSet(
        name,
        lazy_files(probes),
        subject[: len(probes)],
        lazy_files([*matches, *distractors]),
        np.append(subject[len(probes) :], np.full(len(distractors), -1)),
    )


def _has(root: Path, *folders: str) -> bool:
    return all((root / folder).is_dir() for folder in folders)


def _images(folder: Path) -> list[Path]:
    """Return the images in a folder and the folders inside it, without hidden ones."""
    # Sorted: file systems list in any order.
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _labeled_images(root: Path, folder: str, list_name: str, key: str) -> tuple[list[Path], list[int]]:
    """Return the images of a folder and their subject numbers, from the official list or from the file names."""
    for place in (root, root.parent):
        path = place / f"{list_name}_img_ID_pairs.mat"
        if path.is_file():
            names, subjects = _read_subject_list(path, key)
            return [root / folder / name for name in names], subjects
    paths = _images(root / folder)
    subjects = []
    for path in paths:
        number = path.name.split("_")[0]
        if not _SUBJECT_NUMBER.fullmatch(number):
            raise PairsError(
                f"{path}: the file name does not begin with a subject number and `_`; rename it, or put "
                f"{list_name}_img_ID_pairs.mat into {root}"
            )
        subjects.append(int(number))
    if not paths:
        raise PairsError(f"{root / folder}: the folder has no images")
    return paths, subjects


def _read_subject_list(path: Path, key: str) -> tuple[list[str], list[int]]:
    """Read file names and subject numbers from TinyFace's MATLAB file."""
    from scipy.io import loadmat

    try:
        content = loadmat(path, variable_names=[f"{key}_set", f"{key}_ids"])
        names = [str(np.asarray(cell).item()) for cell in content[f"{key}_set"].ravel()]
        subjects = [int(number) for number in content[f"{key}_ids"].ravel()]
    except Exception as error:  # scipy raises many types for a file that is not a MATLAB file
        raise PairsError(f"{path}: not a subject list of TinyFace ({error_reason(error)})") from error
    # A name with a folder could lead out of the set.
    if len(names) != len(subjects) or any(Path(name).name != name for name in names):
        raise PairsError(
            f"{path}: {len(names):,} file names and {len(subjects):,} subject numbers, or a name with a folder"
        )
    return names, subjects
