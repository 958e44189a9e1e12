"""Small disk (a tmpfs) that can be filled and emptied."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path


class TmpfsDisk:
    """File system in memory with a fixed size. A ballast file fills it to the last byte."""

    full_message = "No space left on device"

    def __init__(self, folder: Path, size: int) -> None:
        """Mount a disk of `size` bytes on a folder.

        Raises:
            SystemExit: this process is not permitted to mount.
        """
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(
                f"error: the soak needs the permission to mount a tmpfs: {done.stderr.strip()}; run it as root"
            )
        self._folder = folder

    def fill(self) -> None:
        """Fill the disk completely."""
        with (self._folder / "ballast").open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 12))

    def free(self) -> None:
        """Remove the ballast."""
        (self._folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount the disk."""
        subprocess.run(["umount", "-l", str(self._folder)], check=True)
