"""Hold of this process on a run folder, from the claim to the end of the command."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from facetrain.files import make_folder
from facetrain.run.folder.lock import RunLock

_ENDED: set[Path] = set()
"""Folders of the runs that have ended in this process."""


class Lease:
    """Folder of a run: locked on the leader, and removed at the end if it was created and nothing was written to it."""

    def __init__(self) -> None:
        self._created: list[Path] = []
        self._lock: RunLock | None = None
        self.folder: Path | None = None
        """Folder that is locked; None before."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None and self.folder is not None:
            self._lock.release()
            _ENDED.add(self.folder.resolve())
        for folder in self._created:
            with suppress(OSError):  # it is not empty
                folder.rmdir()

    @property
    def token(self) -> str:
        """Token of the lock; empty before `lock`."""
        return self._lock.token if self._lock else ""

    def create(self, folder: Path, *, exist_ok: bool) -> None:
        """Create a folder, with its parents.

        Raises:
            FileExistsError: it exists, and may not.
            OSError: it cannot be created.
        """
        self._created += make_folder(folder, exist_ok=exist_ok)

    def lock(self, folder: Path, launchers: Sequence[str]) -> None:
        """Lock the folder, once: from now to the end no other process writes this run.

        Raises:
            UsageError: a living process writes the run.
            RunError: the folder cannot be written to.
        """
        if self._lock is None:
            lock = RunLock(folder, launchers)
            lock.acquire()
            self._lock, self.folder = lock, folder

    @staticmethod
    def has_ended(folder: Path) -> bool:
        """Return whether a run in a folder has ended in this process."""
        return folder.resolve() in _ENDED

    def require_lock(self) -> None:
        """Check that the folder is still locked; only on the leader, which has the lock.

        Raises:
            RunError: the folder was moved or deleted, or another process writes the run now.
        """
        if self._lock is not None:
            self._lock.require_held()
