"""Verification sets in the folders that their publishers hand out, recognized by the names of the lists.

| set | list | images |
|---|---|---|
| LFW | `pairs.txt` | a folder per person |
| SLLFW | `pair_SLLFW.txt` | the images of LFW |
| XQLFW | `xqlfw_pairs.txt` | a folder per person, original or aligned |
| CALFW, CPLFW | `pairs_CALFW.txt`, `pairs_CPLFW.txt` | one folder, original or aligned |
| MLFW | `pairs.txt` | one folder, original or aligned |
| RFW | `txts/GROUP/GROUP_pairs.txt` | `data/GROUP/PERSON/`, landmarks in `GROUP_lmk.txt` |
| RFW, aligned | none | a `.bin` set per group: `African_test.bin` and so on |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from facetrain.data.formats.bin import read_bin
from facetrain.data.tools.landmarks import LandmarkTable
from facetrain.data.tools.listed_pairs import (
    ListedPair,
    interleave_folds,
    read_lines,
    read_numbered_pairs,
    require_form,
)
from facetrain.data.tools.pair_writer import PairsToWrite, group_lines, require_readable
from facetrain.errors import PairsError
from facetrain.files import shell_path

_RFW_GROUPS = ("African", "Asian", "Caucasian", "Indian")
_NUMBERS = 10
"""x and y of five points."""


@dataclass(frozen=True)
class _Layout:
    """Names of the list and the image folders of a set; of several folders, the first one that exists is taken."""

    name: str
    list: str
    aligned: tuple[str, ...]
    originals: tuple[str, ...]


_LFW_IMAGES = ("lfw", "lfw_funneled", "lfw-deepfunneled", "lfw-funneled")
# MLFW and LFW have lists of the same name; MLFW is first because the names of its image folders are different.
_LAYOUTS = (
    _Layout("XQLFW", "xqlfw_pairs.txt", ("xqlfw_aligned_112",), ("lfw_original_imgs_min_qual0.85variant11",)),
    _Layout("SLLFW", "pair_SLLFW.txt", (), _LFW_IMAGES),
    _Layout("CALFW", "pairs_CALFW.txt", ("aligned images",), ("images&landmarks/images", "images")),
    _Layout("CPLFW", "pairs_CPLFW.txt", ("aligned images",), ("images",)),
    _Layout("MLFW", "pairs.txt", ("aligned",), ("origin",)),
    _Layout("LFW", "pairs.txt", (), _LFW_IMAGES),
)


def find_published_set(folder: Path, *, originals: bool = False) -> tuple[Path, Path] | None:
    """Return the list and the images of the set in a folder; None if there is no list with a known name.

    Args:
        folder: the folder.
        originals: prefer the original images to the aligned ones of the publisher, because they will be aligned.

    Raises:
        PairsError: the folder has a list with a name that only one set has, but not its images.
    """
    layouts = [layout for layout in _LAYOUTS if (folder / layout.list).is_file()]
    for layout in layouts:
        names = layout.originals + layout.aligned if originals else layout.aligned + layout.originals
        for name in names:
            # Archives often have a folder of the same name inside the folder that they are unpacked to.
            for images in (folder / name / name, folder / name):
                if images.is_dir():
                    return folder / layout.list, images
    if len(layouts) == 1:
        (layout,) = layouts
        expected = ", ".join(layout.aligned + layout.originals)
        raise PairsError(
            f"{folder}: has the list {layout.list} of {layout.name} but no folder of its images ({expected}); give the "
            f"list and --images: facetrain data pairs {shell_path(folder / layout.list)} --images DIR --output SET.bin"
        )
    return None


def find_rfw(folder: Path) -> Path | None:
    """Return the folder with `data/` and `txts/` of RFW, `folder` or `folder/test`; None if there is none."""
    for root in (folder, folder / "test"):
        if (root / "data").is_dir() and _rfw_groups(root):
            return root
    return None


def _rfw_groups(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("txts/*/*_pairs.txt"))


def read_rfw(root: Path) -> list[ListedPair]:
    """Return the pairs of all groups of RFW, fold by fold.

    RFW has ten folds of 600 pairs for each of its four groups. Fold i of the result has the pairs of fold i of all
    groups, so that ten runs of consecutive pairs are again folds, with one threshold for all groups.

    Raises:
        PairsError: a line has an unknown form, or an image is missing; the message has the line number.
    """
    pairs_of_groups = []
    for group in _rfw_groups(root):
        lines = read_lines(root / "txts" / group / f"{group}_pairs.txt")
        listed = read_numbered_pairs(lines, root / "data" / group)
        pairs_of_groups.append([replace(pair, group=group) for pair in listed])
    return interleave_folds(pairs_of_groups)


def read_rfw_landmarks(root: Path) -> LandmarkTable | None:
    """Return the published landmarks by the paths of the images inside `root`; None if there are none.

    Raises:
        PairsError: a line is not a path, a number and five points.
    """
    table = LandmarkTable()
    for path in sorted(root.glob("txts/*/*_lmk.txt")):
        for location, words in read_lines(path):
            try:
                points = np.array(words[2:], np.float32)
            except ValueError:
                points = np.empty(0, np.float32)
            is_valid = len(points) == _NUMBERS and bool(np.isfinite(points).all())
            require_form(is_valid, location, words, "`path number x1 y1 … x5 y5`")
            table["data/" + words[0].rpartition("data/")[2]] = points.reshape(5, 2)
    return table or None


def find_group_bins(folder: Path) -> dict[str, Path]:
    """Return the set of each group by its name; empty if the folder does not have all four."""
    paths = {group: folder / f"{group}_test.bin" for group in _RFW_GROUPS}
    return paths if all(path.is_file() for path in paths.values()) else {}


def group_bin_pairs(folder: Path) -> PairsToWrite:
    """Return the pairs of the sets of the groups, fold by fold, with the groups of the images.

    The sets do not name people: evaluation infers the subjects from the genuine pairs and the repeated images.

    Raises:
        PairsError: a set cannot be read.
    """
    images_of, same_of, places = {}, {}, []
    for group, path in find_group_bins(folder).items():
        images_of[group], same_of[group] = read_bin(path)
        places.append([(group, pair) for pair in range(len(same_of[group]))])
    order = interleave_folds(places)
    places_N = [(group, 2 * pair + side) for group, pair in order for side in range(2)]

    def name(number: int) -> str:
        return "{}_test.bin, image {}".format(*places_N[number])

    def read(number: int) -> bytes:
        group, image = places_N[number]
        return require_readable(images_of[group][image], str(folder / name(number)))

    same = [bool(same_of[group][pair]) for group, pair in order]
    return PairsToWrite(same, read, name=name, group_lines=group_lines([group for group, _ in places_N]))
