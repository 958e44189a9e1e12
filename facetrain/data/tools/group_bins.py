"""RFW as one verification set, from the `.bin` sets of its four groups: `African_test.bin` and so on."""

from __future__ import annotations

from pathlib import Path

from facetrain.data.formats.bin import read_bin
from facetrain.data.tools.listed_pairs import interleave_folds
from facetrain.data.tools.pair_writer import PairsToWrite, require_readable

_RFW_GROUPS = ("African", "Asian", "Caucasian", "Indian")


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
    return PairsToWrite(same, read, name=name, group_lines=["group", *(group for group, _ in places_N)])
