"""NAME.groups.csv beside NAME.bin: the group of people that each image of a verification set belongs to.

The table has a header line `group` and then one row for each image, in the order of the `.bin`. It is a slice table:
`facetrain eval` uses it if no other table is given for the set.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from facetrain.data.formats.image_table import remove_image_table, write_image_table

_HEADER = "group"


def groups_path(bin_path: Path) -> Path:
    """Return the path of the table that belongs to a `.bin` file."""
    return bin_path.with_suffix(".groups.csv")


def write_groups(bin_path: Path, names: Sequence[str]) -> None:
    """Write the group of each image of a `.bin` file.

    Raises:
        PairsError: the file cannot be written.
    """
    write_image_table(groups_path(bin_path), _HEADER, names)


def remove_groups(bin_path: Path) -> None:
    """Remove the table of a `.bin` file that is about to be replaced."""
    remove_image_table(groups_path(bin_path))
