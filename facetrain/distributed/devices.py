"""Device of a process: what the user asks for, and the GPU of its local rank."""

from __future__ import annotations

import torch

from facetrain.device.gpu_driver import gpu_failure
from facetrain.distributed.process_lifetime import own_local_rank
from facetrain.distributed.topology import unusable_gpus
from facetrain.errors import UsageError

_DEVICES = ("auto", "cpu", "cuda")


def require_device(name: str, *, given: str, cpu_setting: str) -> None:
    """Check a device that a user has chosen: auto, cpu or cuda. `given` and `cpu_setting` are texts for the message.

    Raises:
        UsageError: there is no such device, or torch cannot use it.
    """
    if name not in _DEVICES:
        raise UsageError(f"{given}: unknown device; choose one of {', '.join(_DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        if reason := gpu_failure():
            raise UsageError(unusable_gpus(reason, cpu_setting))
        raise UsageError(f"{given}: this machine has no GPU; use {cpu_setting}, or a machine with a GPU")


def pick_device(name: str, local_rank: int, *, cpu_setting: str) -> torch.device:
    """Return the device of a local rank. "auto" is CUDA if a GPU is available, else the CPU.

    `cpu_setting` is how the user selects the CPU, for the message.

    Raises:
        UsageError: there is no GPU for this local rank, or torch cannot use the GPUs.
    """
    if name != "cpu" and (reason := gpu_failure()):
        raise UsageError(unusable_gpus(reason, cpu_setting))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cuda":
        return torch.device(name)
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UsageError(
            f"local rank {local_rank} has no GPU: this machine has {count}; "
            + (
                f"start at most {count} processes on it, let CUDA_VISIBLE_DEVICES show each all GPUs, or use"
                if count
                else "use a machine with a GPU, or"
            )
            + f" {cpu_setting}"
        )
    return torch.device("cuda", local_rank)


def own_gpu() -> int:
    """Return the number of the GPU with which this process computes alone, one of several that a launcher may start."""
    # The launcher may show each its own GPU alone.
    return own_local_rank() if torch.cuda.device_count() > 1 else 0
