"""Abilities of a GPU that decide what it computes, and in which number format."""

from __future__ import annotations

import importlib.util

import torch

_BFLOAT16_CAPABILITY = (8, 0)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a device is a GPU with products of bfloat16: of compute capability 8.0 or higher."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _BFLOAT16_CAPABILITY


def float32_name(device: torch.device) -> str:
    """Return the name of float32 arithmetic on a device: by PyTorch's default, GPUs convolve in TF32."""
    tf32 = device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return "fp32 (convolutions in TF32)" if tf32 else "fp32"


def can_run_kernels(device: torch.device) -> bool:
    """Return whether facetrain's Triton kernels can run on a device, which needs Triton and such a GPU."""
    return multiplies_bfloat16(device) and importlib.util.find_spec("triton") is not None
