"""Verification sets of image pairs, read from files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.formats.bin import read_bin
from facetrain.data.formats.bin_tables import groups_path, read_subjects
from facetrain.data.formats.landmark_file import read_landmarks_beside
from facetrain.data.formats.set_names import NAME_ENDINGS, has_bin_suffix, is_bin, set_name, without_suffixes
from facetrain.data.settings import SET_SUFFIXES
from facetrain.distinct import dense_ids
from facetrain.errors import PairsError
from facetrain.remote.address import is_remote
from facetrain.remote.download import local_path
from facetrain.verify.sets.known_subjects import known_subjects
from facetrain.verify.sets.subjects import connected_subjects


@dataclass(frozen=True)
class PairSet:
    """Encoded images in pairs with labels; images 2i and 2i+1 are pair i."""

    name: str
    images: list[bytes]
    same: np.ndarray
    """True for a pair of one person, bool (pairs,)."""
    subject: np.ndarray | None = None
    """Subject id of each image, int (2 × pairs,) from 0 without gaps; None if unknown."""
    groups: Path | None = None
    """Slice table with the groups of people, beside the set; None if there is none."""
    landmarks: np.ndarray | None = None
    """Landmarks of each image for networks that take them, (2 × pairs, 5, 2), see `data/formats/landmark_file.py`."""
    path: Path | None = None
    """File or folder that the set was read from; None for a generated set."""


def load_pair_set(target: str, folder: Path) -> PairSet:
    """Read a `.bin` set, by its path or by its name in `folder`, and the tables beside it.

    Without a table of subjects, a published list gives the subjects if the set is published, see `known_subjects`.

    Raises:
        PairsError: the set does not exist (the message lists the sets of the folder), exists twice, cannot be read, or
            its table of subjects does not belong to it.
    """
    path = local_path(target) if is_remote(target) else set_file(target, folder)
    if not is_bin(path):
        _refuse_folder((path, Path(target), folder / target, folder / target.upper()))
        names = sorted(set_name(other) for suffix in SET_SUFFIXES for other in path.parent.glob(f"*{suffix}"))
        hint = (
            f"there are {', '.join(names)}" if names else f"{path.parent.absolute()} has no verification sets"
        )
        place = "" if target == str(path) else f" ({path})"
        raise PairsError(f"{target}{place}: no such verification set; {hint}")
    images, same = read_bin(path)
    groups = groups_path(path)
    subjects = read_subjects(path, same)
    # A table beside the set wins over the published list.
    if subjects is None:
        subjects = known_subjects(images, same)
    landmarks = read_landmarks_beside(path, len(images))
    return PairSet(
        set_name(path), images, same, subjects, groups if groups.is_file() else None, landmarks, path
    )


def _refuse_folder(places: Iterable[Path]) -> None:
    """Refuse a set that is a folder, the layout of the other protocols, at one of the places where it may be.

    Raises:
        PairsError: one of them is a folder.
    """
    if place := next(filter(Path.is_dir, places), None):
        raise PairsError(
            f"{place.absolute()} is a folder, and only sets of pairs (.bin) are verified in a run or "
            "calibrated; evaluate TinyFace, IJB and sets of CVLface with `facetrain eval MODEL --target FOLDER`, and "
            "make pairs of a folder of images with `facetrain data pairs`"
        )


def is_set_name(target: str, folder: Path) -> bool:
    """Return whether a target is the name of a `.bin` set in `folder`: a folder ./lfw of images must not hide it."""
    return Path(target).name == target and any(
        is_bin(folder / f"{target}{ending}") for ending in NAME_ENDINGS
    )


def set_file(target: str, folder: Path) -> Path:
    """Return the file of a set, which may not exist: the path `target`, or the file of this name in `folder`.

    Raises:
        PairsError: both exist, or the path is another file than a set.
    """
    path, stem = Path(target), without_suffixes(target)
    files = [folder / f"{stem}{suffix}" for suffix in NAME_ENDINGS]
    named = next((file for file in files if file.is_file()), files[0])
    if not has_bin_suffix(path):
        if path.is_file() and not named.is_file():
            raise PairsError(
                f"{path}: not a verification set; expected a .bin file, as `facetrain data pairs` writes it, or the "
                "folder of a protocol"
            )
        return named
    if path.name == target and path.is_file() and named.is_file() and not path.samefile(named):
        raise PairsError(
            f"{target}: there are two such sets, {path.absolute()} and {named.absolute()}; give ./{target} for the "
            f"first, or {set_name(path)} for the second"
        )
    return path if path.is_file() else named


def load_pair_sets(targets: Iterable[str], folder: Path) -> list[PairSet]:
    """Read several sets.

    Raises:
        PairsError: as `load_pair_set`, or two sets have the same name.
    """
    sets = [load_pair_set(target, folder) for target in targets]
    require_distinct_names([pairs.name for pairs in sets])
    return sets


def require_distinct_names(names: list[str]) -> None:
    """Check that no two evaluation sets have the same name, because results are stored by name.

    Raises:
        PairsError: two names are equal.
    """
    if len(set(names)) < len(names):
        raise PairsError(f"two evaluation sets have the same name: {', '.join(sorted(names))}; rename one")


def known_or_inferred_subjects(pairs: PairSet) -> np.ndarray:
    """Return the subject id of every image, int (N,): the ids of the set, or what its pairs imply.

    Without ids, images with equal bytes are one image, and genuine pairs connect images of one subject.
    """
    if pairs.subject is not None:
        return pairs.subject
    image_N = dense_ids(pairs.images)
    first_P, second_P = image_N[0::2], image_N[1::2]
    return connected_subjects(first_P, second_P, pairs.same, int(image_N.max()) + 1)[image_N]
