"""Checks of the software: versions and builds that must match."""

from __future__ import annotations

import platform
import re
import sys
import warnings
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch

from facetrain.doctor.check_result import CheckResult, failed, passed, warning

# The oldest driver for each major version of CUDA (docs.nvidia.com/deploy/cuda-compatibility).
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")
_DRIVER_ADVICE = (
    "update the driver, install a torch for an older CUDA, or check CUDA_VISIBLE_DEVICES and `nvidia-smi`"
)


def check_python() -> list[CheckResult]:
    """Compare the version of Python with those that facetrain is tested on."""
    message = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        advice = "facetrain is tested on Python 3.11, 3.12 and 3.13: use one of them"
        return [warning("python", message, advice)]
    return [passed("python", message)]


def check_torch_and_torchvision() -> list[CheckResult]:
    """Check that torch and torchvision match: otherwise torchvision's operators are missing when used."""
    torch_version = torch.version.__version__
    try:
        torchvision_version = version("torchvision")
    except PackageNotFoundError:
        advice = "pip install torchvision, from the index that torch came from"
        return [warning("torchvision", "torchvision is not installed; the resnet* backbones need it", advice)]
    message = f"torch {torch_version}, torchvision {torchvision_version}"
    mismatch = find_mismatch(torch_version, torchvision_version, requires("torchvision") or [], message)
    return [mismatch or passed("torch", message)]


def find_mismatch(
    torch_version: str, torchvision_version: str, requirements: list[str], message: str
) -> CheckResult | None:
    """Return a failure if torchvision, which has these requirements, was built for another torch; else None."""
    advice = "install both in one command, from one index: pip install --force-reinstall torch torchvision"
    required = next(
        (match[1] for r in requirements if (match := re.match(r"torch\s*\(?==\s*([\d.]+)", r))), None
    )
    if required and required != torch_version.partition("+")[0]:
        return failed("torch", f"{message}, which needs torch {required}", advice)
    builds = [text.partition("+")[2] for text in (torch_version, torchvision_version)]
    if all(builds) and builds[0] != builds[1]:
        return failed("torch", f"{message}: built for {builds[0]} and for {builds[1]}", advice)
    return None


def check_cuda() -> list[CheckResult]:
    """Compare torch's CUDA with the driver of this machine, and look for NCCL."""
    torch_cuda = torch.version.cuda
    driver = _driver_version()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        return [_check_available_cuda(torch_cuda or "?", driver)]
    if driver is None:
        return [passed("cuda", "no NVIDIA driver: training runs on the CPU")]
    if torch_cuda is None:
        message = f"there is an NVIDIA driver ({driver}), but this torch was built for the CPU only"
        return [failed("cuda", message, "install a CUDA build of torch: pytorch.org/get-started lists them")]
    reason = " ".join(str(caught[0].message).split()) if caught else "torch finds no GPU"
    message = f"torch is built for CUDA {torch_cuda}, driver {driver}: {reason}"
    return [failed("cuda", message, _DRIVER_ADVICE)]


def _check_available_cuda(torch_cuda: str, driver: str | None) -> CheckResult:
    oldest = _OLDEST_DRIVER.get(int(torch_cuda.split(".")[0]), 0) if torch_cuda[0].isdigit() else 0
    message = f"CUDA {torch_cuda}, driver {driver or 'unknown'}"
    if not torch.distributed.is_nccl_available():
        advice = "several GPUs need a torch that was built with NCCL: install another build"
        return failed("cuda", f"{message}, no NCCL", advice)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    # "unknown" is the version of a driver whose file has another format.
    if driver and driver[0].isdigit() and int(driver.split(".")[0]) < oldest:
        message += f", NCCL {nccl}: the driver is older than {oldest}"
        return warning("cuda", message, _DRIVER_ADVICE)
    return passed("cuda", f"{message}, NCCL {nccl}")


def _driver_version() -> str | None:
    """Return the version of the NVIDIA driver, "unknown" if its file has another format, None without a driver."""
    try:
        # The open driver adds the architecture: "Open Kernel Module for x86_64  580.95.05".
        match = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", _DRIVER_VERSION_FILE.read_text())
    except OSError:
        return None
    return match[1] if match else "unknown"
