"""Paths of the numbers in tests/golden/numbers, which other programs computed."""

from __future__ import annotations

from pathlib import Path

_NUMBERS = Path(__file__).resolve().parents[1] / "golden" / "numbers"


def golden_path(name: str) -> Path:
    """Return the path of a file of golden numbers; tests/golden/numbers/README.md describes the files."""
    return _NUMBERS / name
