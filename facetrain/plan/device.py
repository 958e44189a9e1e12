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
    backbone_efficiency: float
    """Share of the product rate that the backbone's training step reaches."""


# v100: the efficiency is fitted to arcface_torch's published 5,004 images/s of an r50 on eight (125 thousand
# identities, Partial FC). The others are assumptions until measured.
DEVICES = {
    "v100": Device(32, 125e12, 15.7e12, 0.9e12, 120e9, 0.19),
    "a100": Device(80, 312e12, 19.5e12, 2.0e12, 230e9, 0.25),
    "h100": Device(80, 989e12, 67e12, 3.35e12, 350e9, 0.20),
    "h200": Device(141, 989e12, 67e12, 4.8e12, 350e9, 0.20),
}
BETWEEN_MACHINES = 12.5e9
"""Bytes a second and GPU over the network between machines: 100 Gbit/s each."""
GPUS_PER_MACHINE = 8
HOST_LINK = 20e9
"""Bytes a second between a GPU and the host's memory (PCIe 4)."""
CONTEXT_BYTES = 600 << 20
"""CUDA's context, kernels and the libraries' workspaces, on each GPU."""
NCCL_BYTES = 300 << 20
"""NCCL's buffers, on each of several GPUs."""
