"""Names of verification sets, and of the files that they are in: NAME.bin, NAME.xz or NAME.bin.xz."""

from __future__ import annotations

import re
from pathlib import Path

from facetrain.data.settings import SET_SUFFIXES

NAME_ENDINGS = (".bin", ".xz", ".bin.xz")
"""What follows the name of a set in the name of its file."""


def is_bin(path: Path) -> bool:
    """Return whether a path is a verification set."""
    return has_bin_suffix(path) and path.is_file()


def has_bin_suffix(path: Path) -> bool:
    """Return whether a path is that of a verification set by its name, also if there is no such file."""
    return path.suffix.lower() in SET_SUFFIXES


def set_name(path: Path) -> str:
    """Return the name of a verification set: that of its file without its suffixes, `lfw` for lfw.bin.xz."""
    return without_suffixes(path.name)


def without_suffixes(target: str) -> str:
    """Return the name or path of a verification set without the suffixes of its file."""
    return re.sub(r"(\.bin)?(\.xz)?\Z", "", target, flags=re.IGNORECASE)
