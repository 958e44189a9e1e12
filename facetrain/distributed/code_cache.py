"""Where compiled code is kept from run to run."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def keep_compiled_code() -> None:
    """Have torch.compile keep its code in the user's cache folder, not in /tmp, which a restart empties.

    TORCHINDUCTOR_CACHE_DIR, where it is set, wins; a home that cannot be written leaves torch's own choice.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "facetrain" / "compiled"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
