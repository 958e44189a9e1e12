"""The folder of a run: whose it is, and what stands in it beside the checkpoints."""

from __future__ import annotations

import json
import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from facetrain.checkpoint.commit import (
    complete_steps,
    point_latest,
    remove_unfinished,
    step_folder,
)
from facetrain.distributed import collectives
from facetrain.distributed.agreement import decide_on_leader
from facetrain.distributed.world import World
from facetrain.errors import RunError, UsageError
from facetrain.files import write_atomically

_PACKAGES = ("facetrain", "torch", "torchvision", "numpy", "opencv-python-headless", "safetensors")


def claim_folder(world: World, *, given: Path | None, default: Path) -> tuple[Path, bool]:
    """Return the folder for a new run, and whether to go on in it because this run was started again.

    An elastic agent starts its workers again after a failure; the folder remembers its launchers. A
    folder that was not given by name gets a number if there is one already, and is made at once: of runs
    that start together, each has its own. `leave_unused` takes it away again. Collective.

    Raises:
        UsageError: the folder that was given holds another run's checkpoints, or cannot be made.
    """
    launchers = _launchers_of(world)
    folder, again = decide_on_leader(world, lambda: _claim(world, launchers, given, default))
    return Path(folder), again


def leave_unused(folder: Path, world: World) -> None:
    """Remove the folder of a run that ended before anything was written there."""
    if world.is_leader:
        with suppress(OSError):  # there is something in it
            folder.rmdir()


def opened_before(folder: Path, world: World) -> bool:
    """Whether this command has opened the folder before, and its workers were started again. Collective."""
    return bool(collectives.broadcast_json(_started_by(folder, _launchers_of(world))))


def open_folder(folder: Path, world: World, config_text: str) -> None:
    """Make the folder, and write down the config and what the run runs on. The leader alone calls it.

    Raises:
        RunError: the folder cannot be written.
    """
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder / "checkpoints")
        write_atomically(folder / "config.yaml", config_text)
        write_atomically(
            folder / "environment.json", json.dumps(_environment(folder, world), indent=1) + "\n"
        )
    except OSError as error:
        raise RunError(f"{error.filename or folder}: {error.strerror or error}") from error


def set_aside_later(folder: Path, step: int) -> None:
    """Take checkpoints after a step out of the way of a run that goes on from it; they are kept, renamed."""
    for later in complete_steps(folder / "checkpoints"):
        if later > step:
            path = step_folder(folder / "checkpoints", later)
            target = path.with_name(f"left_{path.name}")
            number = 2
            while target.exists():
                target = path.with_name(f"left_{path.name}_{number}")
                number += 1
            path.rename(target)
    point_latest(folder / "checkpoints")


def _claim(world: World, launchers: list[str], given: Path | None, default: Path) -> tuple[str, bool]:
    _require_room(given or default)
    folder = given or _own(default, launchers)
    again = _holds_run(folder) and (world.restarts > 0 or _started_by(folder, launchers))
    if given and _holds_run(folder) and not again:
        steps = complete_steps(folder / "checkpoints")
        raise UsageError(
            f"{folder}: holds a run already, at step {steps[-1]}: `facetrain resume {folder}` goes on with it; "
            "for a new run give another --run-dir"
        )
    return str(folder), again


def _require_room(folder: Path) -> None:
    """Refuse a folder that could not be made, before dataset and network are built."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    advice = "give another --run-dir or run.dir"
    if not there.is_dir():
        raise UsageError(f"{folder}: cannot hold a run, {there} is a file; {advice}")
    if not os.access(there, os.W_OK):
        raise UsageError(f"{folder}: cannot hold a run, {there} may not be written to; {advice}")


def _environment(folder: Path, world: World) -> dict[str, Any]:
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.processor()
    return {
        "packages": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv[1:],
        "world_size": world.size,
        "device": f"{world.device.type} {device}".strip(),
        "threads": torch.get_num_threads(),
        "launchers": [*_launchers(folder), world.launcher_id],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _launchers_of(world: World) -> list[str]:
    return sorted({name for name in collectives.gather_json(world.launcher_id) if name})


def _launchers(folder: Path) -> list[str]:
    try:
        return [str(name) for name in json.loads((folder / "environment.json").read_text())["launchers"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _started_by(folder: Path, launchers: list[str]) -> bool:
    return bool(set(_launchers(folder)) & set(launchers))


def _holds_run(folder: Path) -> bool:
    return bool(complete_steps(folder / "checkpoints"))


def _own(default: Path, launchers: list[str]) -> Path:
    """Return the folder in which these launchers have run, or make one."""
    folder, number = default, 1
    while not _started_by(folder, launchers):
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
            folder = default.with_name(f"{default.name}_{number}")
        except OSError as error:
            raise UsageError(f"{folder}: {error.strerror or error}; give another run.dir") from error
    return folder
