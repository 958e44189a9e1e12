"""NAME.groups.csv beside NAME.bin: the group of people that each image of a verification set belongs to.

The table has a header line `group` and then one row for each image, in the order of the `.bin`. It is a slice table:
`facetrain eval` uses it if no other table is given for the set.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from facetrain.data.formats.image_table import write_image_table
from facetrain.errors import PairsError
from facetrain.files import os_errors_as

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


def read_group_table(bin_path: Path) -> bytes | None:
    """Return the content of the table beside a set, which evaluation parses; None if there is no table.

    Raises:
        PairsError: the file cannot be read.
    """
    path = groups_path(bin_path)
    with os_errors_as(PairsError, path):
        return path.read_bytes() if path.is_file() else None
