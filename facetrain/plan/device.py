"""GPUs and what they can do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One kind of GPU; rates are the vendor's for dense products, per second."""

    memory_gib: float
    flops_16: float
    """bf16 and fp16 products."""
    flops_32: float
    memory_bytes: float
    link_bytes: float
    """What one GPU sends in a collective inside a machine."""


DEVICES = {
    "v100": Device(32, 125e12, 15.7e12, 0.9e12, 120e9),
    "a100": Device(80, 312e12, 19.5e12, 2.0e12, 230e9),
    "h100": Device(80, 989e12, 67e12, 3.35e12, 350e9),
    "h200": Device(141, 989e12, 67e12, 4.8e12, 350e9),
}
# Fitted by least squares to what arcface_torch's authors published for r50, r100 and MobileFaceNet in 13 runs
# (docs/performance.md has each). That these shares hold on later GPUs is an assumption until measured.
STEP_SECONDS = 0.030
"""Of a backbone's step, whatever the batch: launching it, clipping, the optimizer."""
PRODUCTS_REACHED = 0.51
"""Share of the product rate at which a backbone's convolutions run."""
MEMORY_REACHED = 0.78
"""Share of the memory's bandwidth at which its operations read and write."""
BETWEEN_MACHINES = 12.5e9
"""Bytes a second and GPU over the network between machines: 100 Gbit/s each."""
GPUS_PER_MACHINE = 8
HOST_LINK = 20e9
"""Bytes a second between a GPU and the host's memory (PCIe 4)."""
CONTEXT_BYTES = 600 << 20
"""CUDA's context, kernels and the libraries' workspaces, on each GPU."""
NCCL_BYTES = 300 << 20
"""NCCL's buffers, on each of several GPUs."""
PROCESS_BYTES = 585 << 20
"""Of a training process on a CPU: Python, torch 2.13 without CUDA, its kernels. Measured on Linux, x86-64."""
TRACER_BYTES = 130 << 20
"""Of torch.compile's tracer, which DDP imports in each of several processes."""
