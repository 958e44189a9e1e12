"""Real faults of storage and memory for tests: full and read-only disks, limits of the kernel."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """Let the kernel refuse writes of this process past `size` bytes of a file (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def memory_limited_to(more: int) -> Iterator[None]:
    """Let the kernel give this process at most `more` bytes of address space in addition to the present ones."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def small_disk(folder: Path, size_kib: int) -> Iterator[None]:
    """Mount a small disk on a folder; skip the calling test if mounting is not allowed."""
    folder.mkdir(exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fill a small disk to its last byte."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    try:
        yield
    finally:
        ballast.unlink()


def make_read_only(folder: Path) -> None:
    """Remount a small disk as read-only."""
    _mount("-o", "remount,ro", str(folder))


def make_writable(folder: Path) -> None:
    """Undo `make_read_only`."""
    _mount("-o", "remount,rw", str(folder))


def _mount(*arguments: str) -> None:
    try:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs the mount command")
    if done.returncode:
        pytest.skip(f"needs the permission to mount: {done.stderr.strip()}")
