"""File that only one of several processes can create, on network file systems too."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

_NO_HARD_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)


class LockFile:
    """File of a lock, as one process sees it."""

    def __init__(self, path: Path, token: str) -> None:
        """Take the path, and a name that no other process has."""
        self.path, self._token = path, token

    def create(self, content: bytes) -> bool:
        """Create the file with all of its content; return False if it exists."""
        scratch = self.path.with_name(f".{self.path.name}.{self._token}")
        try:
            with scratch.open("wb") as file:
                file.write(content)
                file.flush()
                # An empty lock, after a power cut, would be watched like the lock of another host.
                os.fsync(file.fileno())
            try:
                os.link(scratch, self.path)
            except OSError as error:
                if error.errno in _NO_HARD_LINKS:
                    return self._create_exclusively(content)
                # NFS repeats a request whose answer was lost: the link may exist in spite of the error.
                if error.errno != errno.EEXIST and os.stat(scratch).st_nlink != 2:
                    raise
            return os.stat(scratch).st_nlink == 2
        finally:
            with suppress(OSError):
                scratch.unlink()

    def read(self) -> tuple[bytes, int] | None:
        """Return content and modification time of the file; None if there is none."""
        try:
            # Opened again for each read: NFS shows the changes of other hosts to a file that is opened after them.
            with self.open("rb") as file:
                return file.read(1 << 16), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def open(self, mode: Literal["rb", "r+b"]) -> BinaryIO:
        """Open the file, unless something else has its name."""
        # A read of a pipe would wait without end, and a link could lead to a file of another program.
        if not stat.S_ISREG(os.lstat(self.path).st_mode):
            reason = "not a regular file; remove it if no other process writes the run"
            raise OSError(errno.EINVAL, reason, str(self.path))
        return self.path.open(mode)

    def _create_exclusively(self, content: bytes) -> bool:
        try:
            with self.path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True
