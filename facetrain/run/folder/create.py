"""Run folder: creation, reuse after a restart, and the files that describe the run."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import time
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from facetrain.checkpoint.commit import (
    CHECKPOINTS,
    LATEST,
    STEP_NAME,
    complete_steps,
    point_latest,
    put_aside,
    remove_unfinished,
    step_folder,
)
from facetrain.checkpoint.identity import RUN_ID_FILE
from facetrain.distributed import collectives
from facetrain.distributed.agreement import decide_on_leader, fail_together
from facetrain.distributed.world import World
from facetrain.errors import RunError, UsageError
from facetrain.files import (
    make_folder,
    os_errors_as,
    parse_json,
    read_regular_text,
    shell_path,
    write_atomically,
)
from facetrain.remote.address import without_secrets
from facetrain.run.folder.lock import LOCK_FILE

HEAD_ROWS, TEACHER_ROWS = "centers", "teacher_centers"
"""Folders in a run folder for the row files of the trained head, and of the class centers of a teacher."""

_LEFTOVER = re.compile(
    r"\.("
    r".+\.[0-9a-f]{16}\.tmp.*"  # files.scratch_path
    r"|tmp[A-Za-z0-9]{6}"  # the library of safetensors
    r"|run\.lock\.[0-9a-f]{16}(\.claim)?"  # LockFile.create, RunLock
    r")"
)
_LOCK_AGE_S = 60.0
"""Age at which a temporary file of the lock is a leftover: a younger one may belong to a process that waits."""
_ENVIRONMENT = "environment.json"
_PACKAGES = ("facetrain", "torch", "torchvision", "numpy", "opencv-python-headless", "safetensors")


class ExistingRunError(UsageError):
    """Folder that another run has."""


def create_run_folder(
    world: World, *, given: Path | None, default: Path, may_exist: bool = False
) -> tuple[Path, bool]:
    """Return the folder of a new run, and whether the run was restarted and has to continue in it. Collective.

    torch's elastic launcher restarts its workers after a failure. The folder lists the launchers that have used it,
    so restarted workers find their folder again.

    A folder that the user names (`given`) may exist, if it holds no run. If the `default` folder exists, the run gets
    the next number: NAME-2. The folder is created at once: if several runs start at the same time, only one gets it.
    `remove_if_empty` removes it again if the run fails before it writes anything. With `may_exist`, either folder may
    hold a run.

    Raises:
        UsageError: the folder holds the checkpoints of another run, or cannot be created.
    """
    launchers = launchers_of(world)

    def create() -> tuple[str, bool]:
        if given is not None or may_exist:
            return _create(world, launchers, given or default, is_named=True, may_exist=may_exist)
        while True:  # another run may take the folder in between
            folders = [default]
            while folders[-1].exists():
                folders.append(default.with_name(f"{default.name}-{len(folders) + 1}"))
            # Restarted workers continue in the folder that their launcher has used, be it the default or a numbered
            # one.
            own = [folder for folder in folders if _was_used_by(folder, launchers)]
            for folder in own or folders:
                with suppress(ExistingRunError):
                    created = _create(world, launchers, folder, is_named=False, may_exist=False)
                    if folder != default and not created[1]:
                        print(f"{default} exists: the folder of this run is {folder}", flush=True)
                    return created

    folder, restarted = decide_on_leader(world, create)
    return Path(folder), restarted


def remove_if_empty(folder: Path, world: World) -> None:
    """Remove the folder of a run that ended before it wrote anything."""
    if world.is_leader:
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def is_restart(folder: Path, world: World) -> bool:
    """Return whether the launcher of this process has used the folder before, and restarted its workers. Collective."""
    return bool(collectives.broadcast_json(_was_used_by(folder, launchers_of(world))))


def was_restarted(folder: Path, world: World, launchers: list[str]) -> bool:
    """Return whether the folder that this host sees has checkpoints of this job, which has started again."""
    has_run = bool(complete_steps(folder / CHECKPOINTS))
    return has_run and (world.restarts > 0 or _was_used_by(folder, launchers))


def prepare_checkpoints(world: World, folder: Path, *, is_new_run: bool, is_owner: bool) -> None:
    """Clean up after a killed process, before a checkpoint is opened. Only with the lock of the folder. Collective.

    `is_owner` says whether this rank writes the folder.

    Raises:
        UsageError: a new run is to begin in a folder that has checkpoints.
    """
    with fail_together(world):
        if is_owner and is_new_run and complete_steps(folder / CHECKPOINTS):
            raise _existing_run(folder)
        if is_owner:
            with os_errors_as(RunError, folder):
                remove_unfinished(folder / CHECKPOINTS)
                remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed processes from a run folder.

    Only with the lock of the folder, which covers all other files.

    Raises:
        OSError: a folder cannot be read, or a file not be removed.
    """
    for place in (folder, folder / CHECKPOINTS, folder / "profile"):
        for path in place.iterdir() if place.is_dir() else ():
            if not _LEFTOVER.fullmatch(path.name) or path.is_dir():
                continue
            with suppress(FileNotFoundError):  # another process that wants the lock has removed its own file
                is_old = time.time() - path.lstat().st_mtime > _LOCK_AGE_S
                if is_old or not path.name.startswith(".run.lock."):
                    path.unlink()
    # A process removes its row files as soon as it has opened them: only a kill before that leaves one.
    for name in (HEAD_ROWS, TEACHER_ROWS):
        shutil.rmtree(folder / name, ignore_errors=True)


def write_run_files(folder: Path, world: World, config_text: str, run_id: str, *, execution: str) -> None:
    """Write the run id, the config and a description of the environment. For the owner of the folder only.

    `execution` says how training runs the network.

    Raises:
        RunError: the folder cannot be written to.
    """
    with os_errors_as(RunError, folder):
        make_folder(folder / CHECKPOINTS)
        # Before the first checkpoint: without this file, the folder would accept the checkpoints of any run.
        write_atomically(folder / RUN_ID_FILE, run_id + "\n")
        write_atomically(folder / "config.yaml", config_text)
        environment = _environment(folder, world) | {"execution": execution}
        write_atomically(folder / _ENVIRONMENT, json.dumps(environment, indent=1) + "\n")


def recorded_environment(folder: Path) -> dict[str, Any]:
    """Return the content of a run's environment.json; empty if the file is absent or damaged."""
    try:
        recorded = parse_json(read_regular_text(folder / _ENVIRONMENT))
    except (OSError, ValueError):
        return {}
    return recorded if isinstance(recorded, dict) else {}


def package_versions() -> dict[str, str]:
    """Return the versions of the packages on which the numbers of a run depend, by the name of the package."""
    return {found.name: found.version for found in distributions() if found.name in _PACKAGES}


def has_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a checkpoint, or has had one: `latest` names it even if it is missing."""
    return (folder / CHECKPOINTS / LATEST).exists() or bool(complete_steps(folder / CHECKPOINTS))


def rename_later_checkpoints(folder: Path, step: int) -> list[str]:
    """Rename the checkpoints after a step to `left_step_…`, when a run resumes from that step; return the new names.

    They belong to a course of training that the run leaves. They are kept, but no longer count as its checkpoints.
    """
    checkpoints = folder / CHECKPOINTS
    later = [each for each in complete_steps(checkpoints) if each > step]
    names = [put_aside(step_folder(checkpoints, each)).name for each in later]
    # After the renames: if the process ends here, `latest` names a missing checkpoint, and the next resume says so.
    point_latest(checkpoints)
    return names


def missing_newest(folder: Path) -> str | None:
    """Return the name of the checkpoint that `latest` names, if it is newer than all others and does not exist."""
    checkpoints = folder / CHECKPOINTS
    try:
        named = STEP_NAME.fullmatch(read_regular_text(checkpoints / LATEST).strip())
    except (OSError, ValueError):
        return None
    return named[0] if named and int(named[1]) > max(complete_steps(checkpoints), default=0) else None


def _create(
    world: World, launchers: list[str], folder: Path, *, is_named: bool, may_exist: bool
) -> tuple[str, bool]:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    # Before dataset and network are loaded: that takes minutes.
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise UsageError(
            f"{folder}: cannot be created, because {existing} is a file or not writable; give another --run-dir or "
            "run.dir"
        )
    was_used = _was_used_by(folder, launchers)
    has_run = bool(complete_steps(folder / CHECKPOINTS))
    # A folder that the user names belongs to every restart of the job. A numbered one could be another run's.
    restarted = has_run and (was_used or (is_named and world.restarts > 0))
    # Workers that were killed before they wrote anything have left the folder empty, but for their lock.
    is_left_empty = world.restarts > 0 and all(LOCK_FILE in path.name for path in folder.glob("*"))
    if has_run and not restarted and not may_exist:
        raise _existing_run(folder)
    with os_errors_as(UsageError, folder, "give another --run-dir or run.dir"):
        try:
            # Atomic: of two runs that start together, only one gets the default folder.
            make_folder(folder, exist_ok=is_named or was_used or is_left_empty)
        except FileExistsError:
            raise ExistingRunError(f"{folder}: already exists") from None
    return str(folder), restarted


def _existing_run(folder: Path) -> ExistingRunError:
    steps = complete_steps(folder / CHECKPOINTS)
    return ExistingRunError(
        f"{folder}: already holds a run, at step {steps[-1]}; continue it with `facetrain resume {shell_path(folder)}`"
        ", or start another run with --set run.name=NAME or --run-dir FOLDER"
    )


def _environment(folder: Path, world: World) -> dict[str, Any]:
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.processor()
    return {
        "packages": package_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": [without_secrets(argument) for argument in sys.argv[1:]],
        "world_size": world.size,
        "device": f"{world.device.type} {device}".strip(),
        "threads": torch.get_num_threads(),
        # All launchers so far: each of them may start its ranks again.
        "launchers": [*_launchers_in(folder), world.launcher_id],
    }


def launchers_of(world: World) -> list[str]:
    """Return the ids of the elastic agents that started the ranks. Collective."""
    return sorted({name for name in collectives.gather_json(world.launcher_id) if name})


def _launchers_in(folder: Path) -> list[str]:
    """Return the launchers that a folder lists."""
    launchers = recorded_environment(folder).get("launchers")
    return list(map(str, launchers)) if isinstance(launchers, list) else []


def _was_used_by(folder: Path, launchers: list[str]) -> bool:
    return bool(set(_launchers_in(folder)) & set(launchers))
