"""Versions and builds that must fit one another."""

from __future__ import annotations

import platform
import re
import sys
import warnings
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch

from facetrain.doctor.check_result import Finding, failure, ok, warning

# The oldest driver for each major version of CUDA (docs.nvidia.com/deploy/cuda-compatibility).
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_DRIVER_NOTE = Path("/proc/driver/nvidia/version")


def check_python() -> list[Finding]:
    """Compare the interpreter with what the packages are built for."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return [warning("python", found, "facetrain is tested on 3.11, 3.12 and 3.13: use one of them")]
    return [ok("python", found)]


def check_torch_and_torchvision() -> list[Finding]:
    """See that torchvision belongs to this torch: beside another, its operators are missing when used."""
    own = torch.__version__
    try:
        other = version("torchvision")
    except PackageNotFoundError:
        do = "pip install torchvision, from the index that torch came from"
        return [warning("torchvision", "is not installed; the resnet* backbones need it", do)]
    found = f"torch {own}, torchvision {other}"
    return [torch_fits(own, other, requires("torchvision") or [], found) or ok("torch", found)]


def torch_fits(own: str, other: str, required: list[str], found: str) -> Finding | None:
    """Return what is wrong with a torchvision that requires what it says, next to torch `own`."""
    do = "install both anew in one command, from one index: pip install --force-reinstall torch torchvision"
    wanted = next((match[1] for r in required if (match := re.match(r"torch\s*\(?==\s*([\d.]+)", r))), None)
    if wanted and wanted != own.partition("+")[0]:
        return failure("torch", f"{found}, which needs torch {wanted}", do)
    builds = [text.partition("+")[2] for text in (own, other)]
    if all(builds) and builds[0] != builds[1]:
        return failure("torch", f"{found}: built for {builds[0]} and for {builds[1]}", do)
    return None


def check_cuda() -> list[Finding]:
    """Compare torch's CUDA with the driver of this machine, and look for NCCL."""
    built_for = torch.version.cuda
    driver = _driver_version()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        return [_usable_cuda(built_for or "?", driver)]
    if driver is None:
        return [ok("cuda", "no NVIDIA driver here: training runs on the CPU")]
    if built_for is None:
        do = "install the CUDA build: see pytorch.org/get-started for the index of your CUDA"
        return [
            failure("cuda", f"there is a driver ({driver}), but this torch is built for the CPU alone", do)
        ]
    reason = " ".join(str(said[0].message).split()) if said else "torch sees no GPU"
    return [
        failure("cuda", f"torch is built for CUDA {built_for}, driver {driver}: {reason}", _driver_advice())
    ]


def _usable_cuda(built_for: str, driver: str | None) -> Finding:
    oldest = _OLDEST_DRIVER.get(int(built_for.split(".")[0]), 0) if built_for[0].isdigit() else 0
    found = f"CUDA {built_for}, driver {driver or 'unknown'}"
    if not torch.distributed.is_nccl_available():
        return failure("cuda", f"{found}, and no NCCL", "several GPUs need a torch that is built with NCCL")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    if driver and int(driver.split(".")[0]) < oldest:
        return warning("cuda", f"{found}, NCCL {nccl}: older than {oldest}", _driver_advice())
    return ok("cuda", f"{found}, NCCL {nccl}")


def _driver_advice() -> str:
    return "update the driver, take a torch of an older CUDA, or see CUDA_VISIBLE_DEVICES and `nvidia-smi`"


def _driver_version() -> str | None:
    try:
        # The open one says for what: "Open Kernel Module for x86_64  580.95.05".
        match = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", _DRIVER_NOTE.read_text())
    except OSError:
        return None
    return match[1] if match else "unknown"
