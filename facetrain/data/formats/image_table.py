"""Table beside a `.bin` file with one text for each image: a header line, and then one row for each image in order."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from facetrain.errors import PairsError
from facetrain.files import os_errors_as, write_atomically


def write_image_table(path: Path, header: str, texts: Sequence[str]) -> None:
    """Write a table, complete or not at all.

    Raises:
        PairsError: the file cannot be written.
    """
    content = io.StringIO()
    csv.writer(content, lineterminator="\n").writerows([[header], *([text] for text in texts)])
    with os_errors_as(PairsError, path):
        write_atomically(path, content.getvalue())


def remove_image_table(path: Path) -> None:
    """Remove a table, if there is one, because its `.bin` file is about to be replaced."""
    with os_errors_as(PairsError, path):
        path.unlink(missing_ok=True)
