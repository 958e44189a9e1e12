"""Abilities of a GPU or a CPU that decide what it computes, and in which number format."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_BFLOAT16_CAPABILITY = (8, 0)
BFLOAT16_GPU = f"a GPU of compute capability {'.'.join(map(str, _BFLOAT16_CAPABILITY))} or higher"
"""What `multiplies_bfloat16` asks for, for messages."""
_CPU_FACTS = Path("/proc/cpuinfo")


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a device is a GPU with products of bfloat16: of compute capability 8.0 or higher."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _BFLOAT16_CAPABILITY


def bfloat16_fault(device: torch.device) -> str:
    """Return why a GPU cannot train with `train.precision: bf16`; "" if it can."""
    if multiplies_bfloat16(device):
        return ""
    found = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"train.precision: bf16 needs {BFLOAT16_GPU}, and this one has {found}"


def float32_name(device: torch.device) -> str:
    """Return the name of float32 arithmetic on a device: by PyTorch's default, GPUs that have TF32 convolve in it."""
    # The first are the GPUs with TF32. Not `allow_tf32`: torch raises an error when it is read after a program has set
    # this one.
    precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return "fp32 (convolutions in TF32)" if multiplies_bfloat16(device) and precision == "tf32" else "fp32"


def can_run_kernels(device: torch.device) -> bool:
    """Return whether facetrain's Triton kernels can run on a device, which needs Triton and such a GPU."""
    return multiplies_bfloat16(device) and importlib.util.find_spec("triton") is not None


def cpu_multiplies_bfloat16() -> bool:
    """Return whether the CPU has products of bfloat16: AVX-512 BF16, AMX, or Arm's BF16. False if it is unknown."""
    try:
        words = set(_CPU_FACTS.read_text().split())
    except OSError:  # Linux alone has this file
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})
