"""Checks of the machine: processors, memory and GPUs."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from facetrain.cpu_cores import usable_cores
from facetrain.doctor.check_result import CheckResult, count_text, warned_if, warning
from facetrain.plan.device import GIB

_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_FOR_GPUS = GIB
"""Enough for NCCL's buffers; Docker's default of 64 MiB is not."""
_BF16_CAPABILITY = (8, 0)
"""Compute capability from which on GPUs multiply in bf16."""


def check_machine(processes: int, precision: str) -> Iterator[CheckResult]:
    """Check cores and shared memory of this machine for its training processes, and its GPUs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Not os.cpu_count: a container may use fewer.
    cores = usable_cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    message = f"{cores} cores and {memory:.0f} GiB for {count_text(processes, 'process', 'processes')}"
    yield warned_if(cores < processes, "host", message, "start at most one process per core")
    if _SHARED_MEMORY.is_dir():
        # NCCL connects GPUs that have no direct link over it.
        size = shutil.disk_usage(_SHARED_MEMORY).total
        advice = "start the container with --shm-size=8g, or with --ipc=host"
        is_small = gpus > 1 and size < _SHARED_MEMORY_FOR_GPUS
        yield warned_if(is_small, "shared memory", f"/dev/shm has {size / GIB:.2f} GiB", advice)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [_check_gpu(number, precision) for number in range(gpus)]
    yield from results
    # torch warns of a GPU for which it has no code when CUDA starts.
    for each in caught:
        yield warning("gpus", " ".join(str(each.message).split()), "install another build of torch")
    kinds = {torch.cuda.get_device_name(number) for number in range(gpus)}
    if len(kinds) > 1:
        message = f"the GPUs are of several kinds: {', '.join(sorted(kinds))}"
        advice = "all wait for the slowest: select GPUs of one kind with CUDA_VISIBLE_DEVICES"
        yield warning("gpus", message, advice)


def _check_gpu(number: int, precision: str) -> CheckResult:
    free, total = torch.cuda.mem_get_info(number)
    message = f"{torch.cuda.get_device_name(number)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
    if precision == "bf16" and torch.cuda.get_device_capability(number) < _BF16_CAPABILITY:
        return warning(f"gpu {number}", f"{message}; slow in bf16", "set train.precision: fp16")
    advice = "another process uses this GPU: `nvidia-smi` lists it"
    return warned_if(free < 0.9 * total, f"gpu {number}", message, advice)
