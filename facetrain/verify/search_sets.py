"""Sets for searching: TinyFace's folders, and MegaFace's probes and distractors.

Gallery_Match/  Gallery_Distractor/  Probe/                 TinyFace's Testing_Set, or its aligned images
gallery_match_img_ID_pairs.mat  probe_img_ID_pairs.mat      beside or above them; else `7_2.jpg` is of person 7

probes/NAME/*.jpg            distractors/**/*.jpg           MegaFace, under these names or its own:
facescrub_images/NAME/*.jpg  megaface_images/**/*.jpg
facescrub_noises.txt         megaface_noises.txt            InsightFace's lists of what to leave out
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.dataset import IMAGE_SUFFIXES
from facetrain.errors import PairsError
from facetrain.verify.lazy_files import LazyFiles
from facetrain.verify.subjects import dense_ids

_MEGAFACE = (("probes", "distractors"), ("facescrub_images", "megaface_images"))


@dataclass(frozen=True)
class SearchSet:
    """Probes and the gallery that they are searched in; subjects are numbered from 0, −1 is nobody's mate."""

    name: str
    probes: Sequence[bytes]
    probe_subject: np.ndarray
    gallery: Sequence[bytes]
    gallery_subject: np.ndarray


@dataclass(frozen=True)
class DistractorSet:
    """Images of people, and strangers among whom each is searched with one mate."""

    name: str
    probes: Sequence[bytes]
    subject: np.ndarray
    distractors: Sequence[bytes]
    noises: int = 0
    """Images of either kind that lists have left out."""


def is_tinyface(folder: Path) -> bool:
    """Whether a folder is laid out as TinyFace."""
    return _tinyface(folder) is not None


def is_megaface(folder: Path) -> bool:
    """Whether a folder holds probes and distractors."""
    return _megaface(folder) is not None


def open_tinyface(folder: Path, name: str) -> SearchSet:
    """List TinyFace's probes and gallery.

    Raises:
        PairsError: a list cannot be read, or an image's name does not say whose it is.
    """
    root = _tinyface(folder)
    assert root is not None, "asked by is_tinyface"
    matches, owners = _listed(root, "Gallery_Match", "gallery_match", "gallery")
    probes, sought = _listed(root, "Probe", "probe", "probe")
    strangers = _images(root / "Gallery_Distractor")
    known = dense_ids([*sought, *owners])
    return SearchSet(
        name,
        LazyFiles(probes),
        known[: len(sought)],
        LazyFiles([*matches, *strangers]),
        np.append(known[len(sought) :], np.full(len(strangers), -1)),
    )


def open_megaface(folder: Path, name: str) -> DistractorSet:
    """List the probes, a folder per person, and the distractors, without what InsightFace's lists name.

    Raises:
        PairsError: nobody has two images, or there are no distractors; a list cannot be read.
    """
    found = _megaface(folder)
    assert found is not None, "asked by is_megaface"
    people, strangers = found
    there = _images(people), _images(strangers)
    lists = (folder / name for name in ("facescrub_noises.txt", "megaface_noises.txt"))
    probes, distractors = (
        exclude_listed(images, read_noise_list(path)) for images, path in zip(there, lists, strict=True)
    )
    noises = sum(map(len, there)) - len(probes) - len(distractors)
    subject = dense_ids([path.relative_to(people).parts[0] for path in probes])
    # So that the first n of them are any n, not those of the first folders.
    np.random.default_rng(0).shuffle(distractors)
    if not distractors or len(probes) < 2 or np.bincount(subject).max() < 2:
        raise PairsError(
            f"{folder}: {len(probes):,} probes and {len(distractors):,} distractors; "
            "a person needs two images at least, in a folder of his own"
        )
    return DistractorSet(name, LazyFiles(probes), subject, LazyFiles(distractors), noises)


def _tinyface(folder: Path) -> Path | None:
    for root in (folder, folder / "Testing_Set", folder / "tinyface" / "Testing_Set"):
        if (root / "Gallery_Match").is_dir() and (root / "Probe").is_dir():
            return root
    return None


def _megaface(folder: Path) -> tuple[Path, Path] | None:
    for probes, distractors in _MEGAFACE:
        if (folder / probes).is_dir() and (folder / distractors).is_dir():
            return folder / probes, folder / distractors
    return None


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)


def _listed(root: Path, folder: str, list_name: str, key: str) -> tuple[list[Path], list[int]]:
    """Return images and the people in them, by the official list or by their names."""
    for beside in (root, root.parent):
        path = beside / f"{list_name}_img_ID_pairs.mat"
        if path.is_file():
            names, people = _matlab(path, key)
            return [root / folder / name for name in names], people
    paths = _images(root / folder)
    people = []
    for path in paths:
        person = path.name.split("_")[0]
        if not person.isdigit():
            raise PairsError(
                f"{path}: does not begin with a person's number; put {list_name}_img_ID_pairs.mat beside"
            )
        people.append(int(person))
    if not paths:
        raise PairsError(f"{root / folder}: holds no images")
    return paths, people


def _matlab(path: Path, key: str) -> tuple[list[str], list[int]]:
    from scipy.io import loadmat

    try:
        found = loadmat(path, variable_names=[f"{key}_set", f"{key}_ids"])
        names = [str(np.asarray(cell).item()) for cell in found[f"{key}_set"].ravel()]
        people = [int(number) for number in found[f"{key}_ids"].ravel()]
    except Exception as error:  # scipy has no error of its own for a file that is none
        raise PairsError(f"{path}: not TinyFace's list ({' '.join(str(error).split())[:120]})") from error
    if len(names) != len(people) or any(Path(name).name != name for name in names):
        raise PairsError(f"{path}: {len(names):,} names for {len(people):,} numbers, or names with folders")
    return names, people


_FOLDERS = 2
"""Above a distractor: they tell apart images of one name."""


def read_noise_list(path: Path) -> set[str]:
    """Return the images of a list, in the spelling of `exclude_listed`; of a list that is not there, none.

    Lines that begin with # are remarks; of lines with tabs the second column counts.

    Raises:
        PairsError: the file cannot be read as text.
    """
    if not path.exists():
        return set()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PairsError(f"{path}: cannot be read as a list of images: {error}") from error
    columns = [line.split("\t") for line in lines if line.strip() and not line.startswith("#")]
    return {_spelt((column[1] if len(column) > 1 else column[0]).strip()) for column in columns}


def exclude_listed(images: Iterable[Path], noises: set[str]) -> list[Path]:
    """Return the images that a list does not name, be it by their names alone or with two folders."""
    if not noises:
        return list(images)
    return [
        path
        for path in images
        if not noises & {_spelt(path.name), _spelt("/".join(path.parts[-1 - _FOLDERS :]))}
    ]


def _spelt(name: str) -> str:
    # Alignment may have changed the suffix, and FaceScrub is handed out with blanks and with underscores.
    return re.sub(r"\.[A-Za-z]+$|[ _]", "", name)
