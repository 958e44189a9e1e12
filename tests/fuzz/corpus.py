"""Corpus of inputs with distinct error messages, kept between runs: one archive per target."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"


def load(target: str, folder: Path = FOLDER) -> list[bytes]:
    """Return the inputs of a target."""
    path = folder / f"{target}.zip"
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as archive:
        return [archive.read(name) for name in archive.namelist()]


def save(target: str, inputs: list[bytes], folder: Path) -> None:
    """Save inputs; the same inputs always give the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {hashlib.sha256(data).hexdigest()[:16]: data for data in inputs}
    with zipfile.ZipFile(folder / f"{target}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(named):
            archive.writestr(zipfile.ZipInfo(name), named[name], zipfile.ZIP_DEFLATED)
