"""Environment that a run was started in: its description in the run folder, and what differs from the last start."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import facetrain
from facetrain.checkpoint.mirror import Mirror
from facetrain.distributed.world import World
from facetrain.errors import CheckpointError, RunError
from facetrain.files import os_errors_as, parse_json, read_regular_text
from facetrain.remote.address import without_secrets
from facetrain.run.folder.run_files import ENVIRONMENT_FILE
from facetrain.text import count_text

IDENTITIES, IMAGES = "identities", "images"
"""Entries of the file: numbers of the training data that the run has opened."""
ACCEPTED = "accepted"
"""Entry of the file: changes with which the run has continued from its newest checkpoint."""
_PACKAGES = ("facetrain", "torch", "torchvision", "numpy", "opencv-python-headless", "safetensors")


def describe_environment(
    folder: Path, world: World, command_line: Sequence[str], launchers: Sequence[str]
) -> dict[str, Any]:
    """Return the description of the environment of a run, which continues the one in its folder.

    `launchers` are the elastic agents of the job, of all hosts.
    """
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.processor()
    return {
        "packages": package_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": [without_secrets(argument) for argument in command_line],
        "world_size": world.size,
        "device": f"{world.device.type} {device}".strip(),
        "threads": torch.get_num_threads(),
        # All launchers so far: each of them may start its ranks again.
        "launchers": list(dict.fromkeys([*launchers_in(folder), *launchers])),
    }


def recorded_environment(folder: Path) -> dict[str, Any]:
    """Return the content of a run's environment.json; empty if the file is absent, another user's, or damaged.

    Raises:
        RunError: the file cannot be read now: as an absent one, it would let a job that is started again begin anew.
    """
    path = folder / ENVIRONMENT_FILE
    with os_errors_as(RunError, path), suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        return _parsed(read_regular_text(path))
    return {}


def stored_environment(mirror: Mirror) -> dict[str, Any]:
    """Return the content of environment.json in the mirror of a run; empty if the file is absent or damaged."""
    with suppress(CheckpointError):
        return _parsed(mirror.read_text(ENVIRONMENT_FILE))
    return {}


def _parsed(text: str) -> dict[str, Any]:
    with suppress(ValueError):
        recorded = parse_json(text)
        if isinstance(recorded, dict):
            return recorded
    return {}


def package_versions() -> dict[str, str]:
    """Return the versions of the packages on which the numbers of a run depend, by the name of the package."""
    versions = {}
    for name in _PACKAGES:
        # By name: to list all packages, Python reads the description of each.
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def software_of_host() -> dict[str, str]:
    """Return the versions of the packages, and a digest of facetrain's files, which a checkout can have changed."""
    package, digest = Path(facetrain.__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)} ".encode() + path.read_bytes())
    return package_versions() | {"the source of facetrain": digest.hexdigest()[:12]}


def launchers_in(folder: Path) -> list[str]:
    """Return the elastic agents that a folder lists."""
    launchers = recorded_environment(folder).get("launchers")
    return list(map(str, launchers)) if isinstance(launchers, list) else []


def environment_changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield what differs, a line each; what was not recorded before does not differ.

    Both are as `describe_environment` returns them; `before` comes from a file, and may have any values.
    """
    if any(before.get(name, now[name]) != now[name] for name in ("device", "kernels")):
        places = [f"{each.get('device', now['device'])}{_kernels(each)}" for each in (before, now)]
        yield (
            f"the run computed on {places[0]} before, and does on {places[1]} now; numbers may differ in the last "
            "digits"
        )
    recorded, threads = before.get("threads"), now["threads"]
    if recorded not in (None, threads):
        yield (
            f"this process computes with {count_text(threads, 'thread')}, and the run did with {recorded} before: on "
            f"a CPU its numbers may differ in the last digits; set OMP_NUM_THREADS={recorded} to continue bit for bit"
        )
    packages = before.get("packages")
    if not isinstance(packages, dict):
        return
    versions = [
        f"{name} {packages[name]} → {version}"
        for name, version in now["packages"].items()
        if packages.get(name, version) != version
    ]
    if versions:
        yield f"the versions of packages have changed: {', '.join(versions)}; numbers may differ in the last digits"


def _kernels(environment: dict[str, Any]) -> str:
    if "kernels" not in environment:
        return ""
    return f" {'with' if environment['kernels'] else 'without'} kernels for the head"
