"""Evaluation set for identification: TinyFace.

The folders Gallery_Match/, Gallery_Distractor/ and Probe/ of its Testing_Set, with original or aligned images;
`7_2.jpg` is an image of subject 7.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.images.header import is_image_name
from facetrain.distinct import dense_ids
from facetrain.embeddings.image_inputs import lazy_files
from facetrain.errors import PairsError

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
        PairsError: a folder has no images, or a file name does not begin with a subject number.
    """
    roots = (folder, folder / "Testing_Set", folder / "tinyface" / "Testing_Set")
    parts = "Gallery_Match", "Probe"
    root = next((one for one in roots if all((one / part).is_dir() for part in parts)), None)
    if root is None:
        return None
    matches, match_subjects = _labeled_images(root / "Gallery_Match")
    probes, probe_subjects = _labeled_images(root / "Probe")
    distractors = _images(root / "Gallery_Distractor")
    subject = dense_ids([*probe_subjects, *match_subjects])
    return SearchSet(
        name,
        lazy_files(probes),
        subject[: len(probes)],
        lazy_files([*matches, *distractors]),
        np.append(subject[len(probes) :], np.full(len(distractors), -1)),
    )


def _images(folder: Path) -> list[Path]:
    """Return the images in a folder and the folders inside it, without hidden ones."""
    # Sorted: file systems list in any order.
    return sorted(
        path
        for path in folder.rglob("*")
        if is_image_name(path.name)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _labeled_images(folder: Path) -> tuple[list[Path], list[int]]:
    """Return the images of a folder, and their subject numbers from the file names."""
    paths = _images(folder)
    subjects = []
    for path in paths:
        number = path.name.split("_")[0]
        if not _SUBJECT_NUMBER.fullmatch(number):
            raise PairsError(
                f"{path}: the file name does not begin with a subject number and `_`, such as 7_2.jpg; rename it"
            )
        subjects.append(int(number))
    if not paths:
        raise PairsError(f"{folder}: the folder has no images")
    return paths, subjects
