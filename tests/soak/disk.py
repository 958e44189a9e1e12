"""A disk that is full for a while: a small tmpfs, or a limit on the size of files where none may be mounted."""

from __future__ import annotations

import os
import resource
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.support.processes import descendants


class TmpfsDisk:
    """A file system of its own, in memory, that a ballast fills to the last byte."""

    kind = "tmpfs"
    refusal = "No space left on device"

    def __init__(self, folder: Path, size: int) -> None:
        """Mount it.

        Raises:
            PermissionError: this process may not mount.
        """
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise PermissionError(done.stderr.strip())
        self._folder = folder

    def fill(self) -> None:
        """Leave no byte."""
        with (self._folder / "ballast").open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 12))

    def free(self) -> None:
        """Give the room back."""
        (self._folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it."""
        subprocess.run(["umount", "-l", str(self._folder)], check=True)


class FileSizeLimit:
    """The kernel refuses the processes of the run every write to a file of more than a few bytes (EFBIG)."""

    kind = "RLIMIT_FSIZE"
    refusal = "File too large"
    _SMALL = 4096

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def fill(self) -> None:
        """Limit all processes that come from this one."""
        self._limit(self._SMALL)

    def free(self) -> None:
        """Lift the limit."""
        self._limit(resource.RLIM_INFINITY)

    def close(self) -> None:
        """Nothing stays behind."""

    def _limit(self, size: int) -> None:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def small_disk(folder: Path, size: int) -> TmpfsDisk | FileSizeLimit:
    """Make a disk of some bytes on a folder, or what comes nearest."""
    try:
        return TmpfsDisk(folder, size)
    except (PermissionError, FileNotFoundError):
        return FileSizeLimit(folder)
