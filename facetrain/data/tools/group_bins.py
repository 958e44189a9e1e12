"""RFW as aligned `.bin` sets, one for each group: `African_test.bin` and so on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from facetrain.data.formats.bin import read_bin, write_bin
from facetrain.data.formats.bin_groups import remove_groups, write_groups
from facetrain.data.formats.bin_subjects import remove_subjects
from facetrain.data.tools.listed_pairs import interleave_folds

GROUPS = ("African", "Asian", "Caucasian", "Indian")


def find_group_bins(folder: Path) -> dict[str, Path]:
    """Return the set of each group by its name; empty if the folder does not have all four."""
    paths = {group: folder / f"{group}_test.bin" for group in GROUPS}
    return paths if all(path.is_file() for path in paths.values()) else {}


def join_group_bins(folder: Path, output: Path) -> tuple[int, int]:
    """Write the sets of the groups as one .bin, fold by fold, and the groups of the images beside it.

    The sets do not name people: evaluation infers the subjects from the genuine pairs and the repeated images.

    Returns:
        The number of pairs, and of those of one person.

    Raises:
        PairsError: a set cannot be read, or the file cannot be written.
    """
    images_of, same_of, places = {}, {}, []
    for group, path in find_group_bins(folder).items():
        images_of[group], same_of[group] = read_bin(path)
        places.append([(group, pair) for pair in range(len(same_of[group]))])
    order = interleave_folds(places)
    same_P = np.array([same_of[group][pair] for group, pair in order])
    images = [image for group, pair in order for image in images_of[group][2 * pair : 2 * pair + 2]]
    remove_subjects(output)
    remove_groups(output)
    write_bin(output, images, same_P.tolist())
    write_groups(output, [group for group, _ in order for _ in range(2)])
    return len(same_P), int(same_P.sum())
