"""A disk that is full for a while: a small tmpfs."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path


class TmpfsDisk:
    """A file system of its own, in memory, that a ballast fills to the last byte."""

    refusal = "No space left on device"

    def __init__(self, folder: Path, size: int) -> None:
        """Mount it.

        Raises:
            SystemExit: this process may not mount.
        """
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"error: the soak needs the right to mount a small disk: {done.stderr.strip()}")
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
