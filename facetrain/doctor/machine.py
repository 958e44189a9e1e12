"""Processors, memory and GPUs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from facetrain.cpu_cores import usable_cores
from facetrain.doctor.check_result import Finding, count, failure, ok, warning

_SHM = Path("/dev/shm")
_SHM_FOR_GPUS = 1 << 30
_GIB = 1 << 30


def check_host(processes: int) -> list[Finding]:
    """Count the cores and the memory that each process of this machine gets."""
    cores = usable_cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    found = f"{cores} cores and {memory:.0f} GiB for {count(processes, 'process', 'processes')}"
    if cores < processes:
        return [warning("host", found, "start at most one process per core")]
    return [ok("host", found)]


def check_shared_memory(gpus: int) -> list[Finding]:
    """Measure /dev/shm, over which the GPUs of one machine talk where they cannot do it directly."""
    if not _SHM.is_dir():
        return []
    size = shutil.disk_usage(_SHM).total
    found = f"/dev/shm has {size / _GIB:.2f} GiB"
    if gpus > 1 and size < _SHM_FOR_GPUS:
        return [warning("shared memory", found, "start the container with --shm-size=8g, or with --ipc=host")]
    return [ok("shared memory", found)]


def check_gpus(precision: str) -> list[Finding]:
    """See that torch has code for every GPU, that they are alike, and that nobody else fills them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    findings = [_gpu(number, precision) for number in range(count)]
    kinds = {torch.cuda.get_device_name(number) for number in range(count)}
    if len(kinds) > 1:
        do = "the slowest sets the pace: choose equal ones by CUDA_VISIBLE_DEVICES"
        findings.append(warning("gpus", f"of several kinds: {', '.join(sorted(kinds))}", do))
    return findings


def _gpu(number: int, precision: str) -> Finding:
    what = f"gpu {number}"
    major, minor = torch.cuda.get_device_capability(number)
    free, total = torch.cuda.mem_get_info(number)
    found = f"{torch.cuda.get_device_name(number)}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
    built_for = torch.cuda.get_arch_list()
    if built_for and not any(_runs_on(arch, major, minor) for arch in built_for):
        do = f"this torch has code for {', '.join(built_for)}: install another build"
        return failure(what, f"{found}, sm_{major}{minor}", do)
    if precision == "bf16" and major < 8:
        return warning(what, f"{found}; slow in bf16", "set train.precision: fp16")
    if free < 0.9 * total:
        return warning(what, found, "another process uses this GPU: `nvidia-smi` names it")
    return ok(what, found)


def _runs_on(arch: str, major: int, minor: int) -> bool:
    kind, _, number = arch.partition("_")
    version = int("".join(filter(str.isdigit, number)))
    own = major * 10 + minor
    # compute_*: an intermediate code, which the driver translates for any newer GPU.
    return version <= own and (kind == "compute" or version // 10 == major)
