"""Files that a dataset or a tool leaves out, with the reason, so that none is dropped silently."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from facetrain.errors import DataError
from facetrain.files import error_reason, read_regular_text
from facetrain.text import count_text, spreadsheet_text, without_spreadsheet_mark

SKIP_KINDS = {
    "hidden": "hidden files",
    "suffix": "files of other types",
    "special": "broken links, sparse files, devices and lost+found",
    "nested": "folders inside the folder of an identity",
    "no_identity": "files outside the folders of identities",
    "empty": "folders without images",
    "split": "files of other splits",
    "repeated": "lines that repeat an image",
    "unreadable": "images that cannot be read",
    "no_face": "images without a face or its landmarks",
    "equal": "images that are equal to another one",
}
"""Reasons to leave out a file, and their description in a summary."""
_FOLDERS = ("nested", "empty")
"""Kinds of which each entry is a folder."""
_EXAMPLES = 3
_COLUMNS = ["file", "kind", "reason"]


class SkippedFile(NamedTuple):
    """File or folder that was left out."""

    name: str
    """Path inside the dataset; of a mixture, the path of the dataset comes before it."""
    kind: str
    """A key of `SKIP_KINDS`."""
    reason: str


def skipped_table(skipped: Iterable[SkippedFile]) -> str:
    """Return CSV with the columns file, kind and reason."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows((spreadsheet_text(file.name), file.kind, file.reason) for file in skipped)
    return table.getvalue()


def read_skipped_table(path: Path) -> list[SkippedFile]:
    """Return the files of a table that `skipped_table` gave; none if there is no such file.

    Raises:
        DataError: it is no such table.
    """
    if not path.is_file():
        return []
    try:
        header, *rows = list(csv.reader(io.StringIO(read_regular_text(path)))) or [[]]
        if header != _COLUMNS:
            raise ValueError("another first line")
        return [SkippedFile(without_spreadsheet_mark(name), kind, reason) for name, kind, reason in rows]
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            f"{path}: not a table of {', '.join(_COLUMNS)} ({error_reason(error)}); remove it"
        ) from error


def skipped_count(skipped: Sequence[SkippedFile]) -> str:
    """Return the number of what was left out: "1 file", "2 folders", "3 files and folders"."""
    folders = sum(file.kind in _FOLDERS for file in skipped)
    if 0 < folders < len(skipped):
        return f"{len(skipped):,} files and folders"
    return count_text(len(skipped), "folder" if folders else "file")


def skipped_summary(skipped: Iterable[SkippedFile]) -> list[str]:
    """Return one line per kind: the number of files or folders, and the names of the first ones."""
    listed = list(skipped)
    counts = Counter(file.kind for file in listed)
    lines = []
    for kind, description in SKIP_KINDS.items():
        if counts[kind]:
            names = [file.name for file in listed if file.kind == kind][:_EXAMPLES]
            more = ", …" if counts[kind] > len(names) else ""
            lines.append(f"{description}: {counts[kind]:,} ({', '.join(names)}{more})")
    return lines
