"""Checks of the machine: processors, memory and GPUs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from facetrain.cpu_cores import usable_cores
from facetrain.doctor.check_result import CheckResult, count_text, failed, passed, warning
from facetrain.plan.device import GIB

_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_FOR_GPUS = GIB
"""Enough for NCCL's buffers; Docker's default of 64 MiB is not."""
_BF16_CAPABILITY = 8
"""Compute capability (major) from which on GPUs multiply in bf16."""


def check_host(processes: int) -> list[CheckResult]:
    """Compare the cores of this machine with its training processes, and report its memory."""
    cores = usable_cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    message = f"{cores} cores and {memory:.0f} GiB for {count_text(processes, 'process', 'processes')}"
    if cores < processes:
        return [warning("host", message, "start at most one process per core")]
    return [passed("host", message)]


def check_shared_memory(gpus: int) -> list[CheckResult]:
    """Check the size of /dev/shm, over which NCCL connects GPUs that have no direct link."""
    if not _SHARED_MEMORY.is_dir():
        return []
    size = shutil.disk_usage(_SHARED_MEMORY).total
    message = f"/dev/shm has {size / GIB:.2f} GiB"
    if gpus > 1 and size < _SHARED_MEMORY_FOR_GPUS:
        advice = "start the container with --shm-size=8g, or with --ipc=host"
        return [warning("shared memory", message, advice)]
    return [passed("shared memory", message)]


def check_gpus(precision: str) -> list[CheckResult]:
    """Check that torch supports every GPU, that all are of one kind, and that no other process uses them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    results = [_check_gpu(number, precision) for number in range(count)]
    kinds = {torch.cuda.get_device_name(number) for number in range(count)}
    if len(kinds) > 1:
        message = f"the GPUs are of several kinds: {', '.join(sorted(kinds))}"
        advice = "all wait for the slowest: select GPUs of one kind with CUDA_VISIBLE_DEVICES"
        results.append(warning("gpus", message, advice))
    return results


def _check_gpu(number: int, precision: str) -> CheckResult:
    name = f"gpu {number}"
    major, minor = torch.cuda.get_device_capability(number)
    free, total = torch.cuda.mem_get_info(number)
    message = f"{torch.cuda.get_device_name(number)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
    architectures = torch.cuda.get_arch_list()
    if architectures and not any(_runs_on(arch, major, minor) for arch in architectures):
        advice = f"this torch has code for {', '.join(architectures)}: install another build"
        return failed(name, f"{message}, sm_{major}{minor}", advice)
    if precision == "bf16" and major < _BF16_CAPABILITY:
        return warning(name, f"{message}; slow in bf16", "set train.precision: fp16")
    if free < 0.9 * total:
        return warning(name, message, "another process uses this GPU: `nvidia-smi` lists it")
    return passed(name, message)


def _runs_on(arch: str, major: int, minor: int) -> bool:
    """Return whether code for `arch` (such as sm_80 or compute_90) runs on a GPU of this compute capability."""
    kind, _, number = arch.partition("_")
    version = int("".join(filter(str.isdigit, number)))
    # compute_*: intermediate code (PTX), which the driver translates for any newer GPU.
    return version <= major * 10 + minor and (kind == "compute" or version // 10 == major)
