"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

LATEST = "latest"
_STEP = re.compile(r"step_(\d{8,})")


def step_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step belongs."""
    return folder / f"step_{step:08d}"


def scratch_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is written before it is whole; the same on every rank."""
    return folder / f".step_{step:08d}.writing"


def complete_steps(folder: Path) -> list[int]:
    """Return the steps that have a whole checkpoint, ascending."""
    if not folder.is_dir():
        return []
    found = [_STEP.fullmatch(entry.name) for entry in folder.iterdir()]
    return sorted(
        int(match[1]) for match in found if match and (folder / match[0] / "manifest.json").exists()
    )


def remove_unfinished(folder: Path) -> None:
    """Remove what an interrupted save or removal has left."""
    if folder.is_dir():
        for entry in folder.iterdir():
            if entry.name.startswith(".step_"):
                shutil.rmtree(entry, ignore_errors=True)


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(folder: Path, step: int) -> None:
    """Give a step's written folder its name, and let `latest` name it.

    A crash at any point leaves `latest` on a whole checkpoint.
    """
    target = step_folder(folder, step)
    scratch = scratch_folder(folder, step)
    sync_to_disk(scratch)
    if target.exists():
        # Saved before, and saved again after a resume from an earlier step: move aside, never delete first.
        os.rename(target, folder / f".step_{step:08d}.old")
    os.rename(scratch, target)
    sync_to_disk(folder)
    write_whole(folder / LATEST, target.name + "\n")
    shutil.rmtree(folder / f".step_{step:08d}.old", ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write a small text file: after a crash there is the old one or the new one."""
    scratch = path.with_name(f".{path.name}.writing")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    sync_to_disk(path.parent)
