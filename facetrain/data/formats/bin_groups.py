"""NAME.groups.csv beside NAME.bin: the group of people that each image of a verification set belongs to.

The table has a header line `group` and then one row for each image, in the order of the `.bin`. It is a slice table:
`facetrain eval` uses it if no other table is given for the set.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from facetrain.errors import PairsError
from facetrain.files import os_errors_as, write_atomically

_HEADER = "group"


def groups_path(bin_path: Path) -> Path:
    """Return the path of the table that belongs to a `.bin` file."""
    return bin_path.with_suffix(".groups.csv")


def write_groups(bin_path: Path, names: Sequence[str]) -> None:
    """Write the group of each image of a `.bin` file.

    Raises:
        PairsError: the file cannot be written.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[_HEADER], *([name] for name in names)])
    with os_errors_as(PairsError, groups_path(bin_path)):
        write_atomically(groups_path(bin_path), text.getvalue())


def remove_groups(bin_path: Path) -> None:
    """Remove the table of a `.bin` file that is about to be replaced."""
    with os_errors_as(PairsError, groups_path(bin_path)):
        groups_path(bin_path).unlink(missing_ok=True)
