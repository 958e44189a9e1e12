"""Folders that appear whole or not at all.

A checkpoints folder holds `step_00002000/` and so on, and `latest`, which names the newest. What
begins with a dot is on its way in or out:

    .step_00002000.tmp-5f3a90c2    being written
    .step_00002000.replaced        stood under this step before, until the new one does
    .step_00002000.removed         being removed
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from facetrain.files import sync_folder, write_atomically

LATEST = "latest"
STEP_NAME = re.compile(r"step_(\d{8,18})")
_REPLACED = ".replaced"


def step_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step belongs."""
    return folder / f"step_{step:08d}"


def make_scratch(folder: Path, step: int) -> Path:
    """Make the folder in which the checkpoint of a step is written before it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = _hidden(step_folder(folder, step), f".tmp-{secrets.token_hex(4)}")
    scratch.mkdir()
    return scratch


def complete_steps(folder: Path) -> list[int]:
    """Return the steps that have a whole checkpoint, ascending."""
    if not folder.is_dir():
        return []
    found = [STEP_NAME.fullmatch(entry.name) for entry in folder.iterdir()]
    return sorted(
        int(match[1]) for match in found if match and (folder / match[0] / "manifest.json").exists()
    )


def remove_unfinished(folder: Path) -> None:
    """Remove what an interrupted save or removal has left; bring back what was about to be replaced."""
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if not entry.name.startswith(".step_"):
            continue
        target = folder / entry.name.removeprefix(".").removesuffix(_REPLACED)
        if entry.name.endswith(_REPLACED) and not target.exists():
            os.rename(entry, target)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def publish(scratch: Path, target: Path) -> None:
    """Give a written folder its name, and let `latest` name it; `remove_replaced` is to follow."""
    sync_folder(scratch)
    replaced, again = _hidden(target, _REPLACED), target.exists()
    if again:
        # Saved before, and again after going back to an earlier step: move aside, never delete first.
        os.rename(target, replaced)
    try:
        os.rename(scratch, target)
    except OSError:
        if again:
            os.rename(replaced, target)
        raise
    sync_folder(target.parent)
    write_atomically(target.parent / LATEST, target.name + "\n")


def remove_replaced(target: Path) -> None:
    """Remove what stood under a name before `publish`."""
    shutil.rmtree(_hidden(target, _REPLACED), ignore_errors=True)


def point_latest(folder: Path) -> None:
    """Let `latest` name the newest whole checkpoint, after others were taken out of the way."""
    steps = complete_steps(folder)
    if steps:
        write_atomically(folder / LATEST, step_folder(folder, steps[-1]).name + "\n")


def take_away(target: Path) -> None:
    """Remove a folder: first its name, so that half of it is never seen."""
    aside = _hidden(target, ".removed")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(target, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _hidden(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}{suffix}")
