"""Choices of the user in the environment: the cache folder, and whether downloads are off."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def user_cache_folder() -> Path:
    """Return facetrain's folder in the cache folder of the user, which need not exist: XDG_CACHE_HOME, or ~/.cache.

    Raises:
        FileNotFoundError: the user has no home folder: HOME is not set, and the system does not know the user.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification of this variable says to ignore a relative path: it would be another folder in each command.
    if base.is_absolute():
        return base / "facetrain"
    try:
        return Path.home() / ".cache" / "facetrain"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, str(error)) from error


def is_offline() -> bool:
    """Return whether the user has switched downloads off, by FACETRAIN_OFFLINE or the variable of huggingface_hub."""
    values = (os.environ.get(name, "") for name in ("FACETRAIN_OFFLINE", "HF_HUB_OFFLINE"))
    return any(value.lower() not in ("", "0", "false", "no", "off") for value in values)
