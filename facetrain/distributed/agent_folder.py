"""The folder in which torch's elastic agent keeps what its workers leave for it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "facetrain-agent-"
_NAME = re.compile(_PREFIX + r"[a-z0-9_]{8}")
_BEING_MADE_S = 60
"""A folder so young may be about to be locked."""


@contextmanager
def agent_folder() -> Iterator[Path]:
    """Make a folder, and remove it at the end, along with those that killed launchers have left here."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            # The kernel gives the lock back when this process ends, however it does.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.iterdir():
        if _NAME.fullmatch(path.name):
            with suppress(OSError):  # it is locked, another user's, or gone
                _remove_unless_held(path)


def _remove_unless_held(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.getuid() and time.time() - status.st_mtime > _BEING_MADE_S:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(descriptor)
