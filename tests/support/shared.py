"""Path of shared material that is not in the repository: real face images and published models."""

from __future__ import annotations

from pathlib import Path

import pytest

_SHARED = Path(__file__).resolve().parents[3] / "shared"


def shared_path(name: str) -> Path:
    """Return the path of a shared file or folder; skip the calling test if it is absent."""
    path = _SHARED / name
    if not path.exists():
        pytest.skip(f"needs {name} of the shared material, which is not on this machine")
    return path
