"""Checks of the machines: software, processors, GPUs, and the network between the ranks."""

from __future__ import annotations

import platform
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from facetrain.device.capability import bfloat16_fault
from facetrain.device.gpu_driver import gpu_failure
from facetrain.distributed import collectives
from facetrain.doctor.check_result import CheckResult, failed, passed, warned_if
from facetrain.errors import install_torch
from facetrain.files import error_reason
from facetrain.telemetry.memory import available_bytes
from facetrain.text import count_text

_GIB = 1 << 30

_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_FOR_GPUS = _GIB
"""Enough for NCCL's buffers; Docker's default of 64 MiB is not."""
_MESSAGE_BYTES = 1 << 25
_ROUNDS = 5
_SLOW_BYTES_PER_SECOND = 100e6
"""Nearly Gigabit Ethernet. At this rate the gradients of an r50 (174 MB) take about three seconds per step."""


def _check_torch() -> CheckResult:
    message = f"Python {platform.python_version()}, torch {torch.version.__version__}"
    try:
        # torchvision reports it itself if it was built for another torch or another CUDA.
        import torchvision
    except (ImportError, RuntimeError) as error:
        reason = f"{message}: torchvision cannot be imported: {error_reason(error)}"
        return failed("torch", reason, install_torch())
    return passed("torch", f"{message}, torchvision {torchvision.__version__}")


def _check_cuda() -> CheckResult:
    is_available = torch.cuda.is_available()
    message = f"torch is built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'the CPU only'}"
    if is_available and torch.distributed.is_nccl_available():
        return passed("cuda", f"{message} and NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    if is_available:
        advice = "several GPUs need a torch that was built with NCCL: install another build"
        return failed("cuda", f"{message}, without NCCL", advice)
    if not (reason := gpu_failure()):
        return passed("cuda", "no GPU: training runs on the CPU")
    advice = (
        "install a CUDA build of torch (pytorch.org/get-started lists them) that is not newer than the driver, and "
        "check CUDA_VISIBLE_DEVICES and `nvidia-smi`"
    )
    return failed("cuda", f"{message}: {reason}", advice)


def check_machine(processes: int, cores: int, precision: str) -> Iterator[CheckResult]:
    """Check torch and CUDA, cores and shared memory of this machine for its training processes, and its GPUs."""
    yield _check_torch()
    yield _check_cuda()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    free = available_bytes()
    memory = "" if free is None else f" and {free / _GIB:.1f} GiB of free memory"
    processes_text = count_text(processes, "process", "processes")
    message = f"{count_text(cores, 'core')}{memory} for {processes_text}"
    yield warned_if(cores < processes, "host", message, "start at most one process per core")
    if _SHARED_MEMORY.is_dir():
        # NCCL connects GPUs that have no direct link over it.
        size = shutil.disk_usage(_SHARED_MEMORY).total
        advice = "start the container with --shm-size=8g, or with --ipc=host"
        is_small = gpus > 1 and size < _SHARED_MEMORY_FOR_GPUS
        yield warned_if(is_small, "shared memory", f"/dev/shm has {size / _GIB:.2f} GiB", advice)
    for number in range(gpus):
        yield _check_gpu(number, precision)


def _check_gpu(number: int, precision: str) -> CheckResult:
    free, total = torch.cuda.mem_get_info(number)
    message = f"{torch.cuda.get_device_name(number)}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
    if precision == "bf16" and (fault := bfloat16_fault(torch.device("cuda", number))):
        return failed(f"gpu {number}", f"{message}; {fault}", "set it to fp16")
    advice = "another process uses this GPU: `nvidia-smi` lists it"
    return warned_if(free < 0.9 * total, f"gpu {number}", message, advice)


def check_network(device: torch.device) -> CheckResult:
    """Measure an all-reduce of 32 MiB over the ranks. Collective."""
    world_size = collectives.world_size()
    if world_size == 1:
        return passed("network", "one process; under torchrun the network between the ranks is measured")
    hosts = set(collectives.gather_json(socket.gethostname()))
    rate = _all_reduce_rate(device)
    message = (
        f"{world_size} ranks on {count_text(len(hosts), 'host')}: {'NCCL' if device.type == 'cuda' else 'gloo'} "
        f"all-reduce at {rate / 1e6:,.0f} MB/s per rank"
    )
    advice = (
        "gradients are sent at this rate in every step: set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, on every host, "
        "to the fastest interface between the hosts, or set train.compress_gradients"
    )
    return warned_if(rate < _SLOW_BYTES_PER_SECOND, "network", message, advice)


def _all_reduce_rate(device: torch.device) -> float:
    """Return the bytes per second that leave each rank: 2 (W − 1) / W of the message, as for a ring."""
    message = torch.zeros(_MESSAGE_BYTES // 4, device=device)
    collectives.sum_(message)  # The first one opens the connections.
    collectives.barrier()
    start = time.perf_counter()
    for _ in range(_ROUNDS):
        collectives.sum_(message)
    message[0].item()  # Waits for the GPU.
    seconds = time.perf_counter() - start
    world_size = collectives.world_size()
    return 2 * (world_size - 1) / world_size * _MESSAGE_BYTES * _ROUNDS / seconds
