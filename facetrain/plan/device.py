"""GPUs, and the measured constants of the cost model."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
"""Bytes of a GiB."""


@dataclass(frozen=True)
class Device:
    """One kind of GPU. Rates are stated by the vendor for dense products, per second."""

    memory_gib: float
    flops_16: float
    """Operations per second in bf16 and fp16 products."""
    flops_32: float
    """Operations per second in float32 products."""
    memory_bytes: float
    """Bytes per second between the GPU and its memory."""
    link_bytes: float
    """Bytes per second that one GPU sends in a collective within a machine (NVLink)."""
    has_bf16: bool = True
    """Tensor cores multiply bf16: compute capability 8.0 or later."""
    memory_reached: float = 0.57
    """Share of the vendor's memory bandwidth that a backbone's kernels reach: an assumption for later GPUs than V100,
    whose larger caches and loads ahead of the arithmetic hide more of the latency."""


# From the vendor's data sheets of the SXM variants; `link_bytes` is about 0.8 of the NVLink rate in one direction.
DEVICES = {
    "v100": Device(32, 125e12, 15.7e12, 0.9e12, 120e9, has_bf16=False, memory_reached=0.46),
    "a100": Device(80, 312e12, 19.5e12, 2.0e12, 230e9),
    "h100": Device(80, 989e12, 67e12, 3.35e12, 350e9),
    "h200": Device(141, 989e12, 67e12, 4.8e12, 350e9),
}

# Fitted by least squares, with V100's `memory_reached`, to 13 runs of r50, r100 and MobileFaceNet that arcface_torch's
# authors published for V100 (docs/log/log.md lists each); `python -m tests.support.published_speeds` repeats the fit.
# That it holds for later GPUs is an assumption: nothing was measured there.
PRODUCTS_REACHED = 0.58
"""Share of the vendor's product rate that a backbone's convolutions reach."""
SPEED_RANGE = 0.25
"""Fraction by which a speed may miss its forecast, in either direction: an assumption, which no run has confirmed."""
ARCFACE_TORCH_SECONDS = 0.026
"""Part of a step of arcface_torch in which the GPU waits for the host: it reads the loss and the gradients' norm in
every step. facetrain reads neither, so its forecast is without this part."""

# Assumptions, not measured.
LAUNCH_SECONDS = 8e-6
"""Time of the host for one kernel: dispatch, autograd and launch."""
BETWEEN_MACHINES = 12.5e9
"""Bytes per second and GPU over the network between machines: 100 Gbit/s each."""
GPUS_PER_MACHINE = 8
HOST_LINK = 20e9
"""Bytes per second between a GPU and the host's memory: PCIe 4 with 16 lanes."""
CONTEXT_BYTES = 600 << 20
"""CUDA context, kernels and workspaces of the libraries, on each GPU."""
NCCL_BYTES = 300 << 20
"""NCCL's buffers, on each of several GPUs."""

# Measured on Linux x86-64 with torch 2.13 for the CPU; tests/support/train_for_memory.py measures them again.
PROCESS_BYTES = 588 << 20
"""A training process on a CPU: Python, torch without CUDA, and its kernels."""
