"""Files that a command leaves: whether they can be written is asked before the work, not behind hours of it."""

from __future__ import annotations

import os
from pathlib import Path

from facetrain.errors import UsageError


def require_writable(*files: Path | None) -> None:
    """Refuse files that could not be written; None stands for one that is not wanted.

    Raises:
        UsageError: a folder has the name, the folder is not there, or may not be written to.
    """
    for path in files:
        if path is None:
            continue
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; give the name of a file in it")
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent} to write it to")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"{path}: may not be written (permission denied)")


def require_absent(folder: Path | None) -> None:
    """Refuse to write a dataset where something lies already.

    Raises:
        UsageError: it does.
    """
    if folder is not None and folder.exists():
        raise UsageError(f"{folder}: is there already; remove it, or write into another folder")


def write_text(path: Path, text: str) -> None:
    """Write a small file that the user asked for.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
