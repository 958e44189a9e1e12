"""Checks of the software: versions and builds that must match."""

from __future__ import annotations

import platform
import sys
import warnings

import torch

from facetrain.distributed.process_setup import has_gpu_driver
from facetrain.doctor.check_result import CheckResult, failed, passed, warned_if
from facetrain.files import error_reason


def check_software() -> list[CheckResult]:
    """Check Python, torch with torchvision, and CUDA."""
    return [_check_python(), _check_torch(), _check_cuda()]


def _check_python() -> CheckResult:
    message = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    is_tested = (3, 11) <= sys.version_info[:2] <= (3, 13)
    advice = "facetrain is tested on Python 3.11, 3.12 and 3.13: use one of them"
    return warned_if(not is_tested, "python", message, advice)


def _check_torch() -> CheckResult:
    message = f"torch {torch.version.__version__}"
    try:
        # torchvision reports it itself if it was built for another torch or another CUDA.
        import torchvision
    except (ImportError, RuntimeError) as error:
        advice = (
            "install both in one command, from one index: pip install --force-reinstall torch torchvision"
        )
        return failed("torch", f"{message}: torchvision cannot be imported: {error_reason(error)}", advice)
    return passed("torch", f"{message}, torchvision {torchvision.__version__}")


def _check_cuda() -> CheckResult:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    message = f"torch is built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'the CPU only'}"
    if is_available and torch.distributed.is_nccl_available():
        return passed("cuda", f"{message} and NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    if is_available:
        advice = "several GPUs need a torch that was built with NCCL: install another build"
        return failed("cuda", f"{message}, without NCCL", advice)
    if not has_gpu_driver():
        return passed("cuda", "no GPU driver: training runs on the CPU")
    # torch's warning says whether the driver is too old, or is not answering.
    reason = " ".join(str(caught[0].message).split()) if caught else "torch finds no GPU"
    advice = (
        "install a CUDA build of torch (pytorch.org/get-started lists them) that is not newer than the driver, and "
        "check CUDA_VISIBLE_DEVICES and `nvidia-smi`"
    )
    return failed("cuda", f"{message}: {reason}", advice)
