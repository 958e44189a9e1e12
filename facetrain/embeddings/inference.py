"""Settings for running a network on images, which the commands and functions that embed share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Inference:
    """Settings for running a network on images."""

    device: str = "auto"
    """`cpu`, `cuda`, or `auto`, which takes a GPU if there is one."""
    batch_size: int = 256
    """Images per forward pass on each rank."""
    bf16: bool = False
    """Run the network in bfloat16 autocast instead of float32."""
    workers: int | None = None
    """Decoding threads on each rank; None: the cores of the machine divided by its ranks."""
