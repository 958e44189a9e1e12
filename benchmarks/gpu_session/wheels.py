"""Packages for a machine without a network: downloaded as wheels elsewhere, carried there, unpacked without pip."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from facetrain.errors import UsageError

PYTHON = "3.12"
"""Python version of the wheels that `download` fetches."""
CARRIED = (
    "pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection",
    "typer", "annotated-doc", "click", "shellingham", "rich", "markdown-it-py", "mdurl", "pygments",
    "pyyaml", "safetensors", "pytest", "iniconfig", "pluggy", "packaging",
)  # fmt: skip
"""Small packages that a machine with PyTorch may lack. NumPy, OpenCV, torchvision and the like must be there."""
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
_WHEEL = re.compile(r".+-(?P<python>[a-z0-9.]+)-(?P<abi>[a-z0-9_.]+)-[^-]+\.whl")


def download(folder: Path, lock: Path, further: Sequence[str] = ()) -> None:
    """Download the carried packages for Python 3.12 on Linux x86-64, in the versions of requirements.lock.

    Raises:
        UsageError: the lock has no such package, or pip failed.
    """
    pinned = dict(re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", lock.read_text(encoding="utf-8"), re.MULTILINE))
    names = (*CARRIED, *further)
    if missing := [name for name in names if name not in pinned]:
        raise UsageError(f"{lock}: does not pin {', '.join(missing)}; use names of that file")
    platforms = [option for platform in _PLATFORMS for option in ("--platform", platform)]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *("--python-version", PYTHON, "--implementation", "cp", *platforms, "--dest", str(folder)),
        *(f"{name}=={pinned[name]}" for name in names),
    ]
    if subprocess.run(command).returncode:
        raise UsageError("pip could not download the wheels; its message is above")


def unpack(wheels: Path, target: Path) -> Path:
    """Unpack all wheels of a folder into `target`, for sys.path. Return `target`.

    Raises:
        UsageError: there is no wheel, or one is for another Python.
    """
    paths = sorted(wheels.glob("*.whl"))
    if not paths:
        raise UsageError(f"{wheels}: has no wheels; fill it with scripts/gpu_session --carry {wheels}")
    for path in paths:
        _check_python(path)
    # Always anew: a folder from an earlier slice may be of other wheels, or half unpacked.
    shutil.rmtree(target, ignore_errors=True)
    for path in paths:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(target)
    return target


def _check_python(path: Path) -> None:
    name = _WHEEL.fullmatch(path.name)
    here = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if name and name["python"].startswith("cp") and name["abi"] != "abi3" and name["python"] != here:
        raise UsageError(f"{path}: is for {name['python']}, and this Python is {here}; carry wheels for it")
