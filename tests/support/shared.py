"""Where the peers' recorded numbers and the real faces lie, for tests that use them where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

_SHARED = Path(__file__).resolve().parents[3] / "shared"


def shared_path(name: str) -> Path:
    """Return a file or folder of the shared material; skip the calling test where it is absent."""
    path = _SHARED / name
    if not path.exists():
        pytest.skip(f"needs {name} of the shared material, which is not on this machine")
    return path
