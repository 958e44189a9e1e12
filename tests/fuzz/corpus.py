"""Inputs that were refused in words of their own, kept from run to run: one archive for each target."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"


def load(target: str, folder: Path = FOLDER) -> list[bytes]:
    """Return what was kept of a target."""
    path = folder / f"{target}.zip"
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as archive:
        return [archive.read(name) for name in archive.namelist()]


def save(target: str, inputs: list[bytes], folder: Path) -> None:
    """Keep inputs; the same ones always make the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {hashlib.sha256(data).hexdigest()[:16]: data for data in inputs}
    with zipfile.ZipFile(folder / f"{target}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(named):
            archive.writestr(zipfile.ZipInfo(name), named[name], zipfile.ZIP_DEFLATED)
