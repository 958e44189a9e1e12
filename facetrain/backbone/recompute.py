"""Recomputation of a block's activations in the backward pass."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def run_block(block: nn.Module, x: Tensor, *inputs: Tensor | None, recompute: bool) -> Tensor:
    """Run a block; with `recompute`, store only its inputs and run the block again in the backward pass."""
    if not (recompute and x.requires_grad):
        output: Tensor = block(x, *inputs)
    else:
        contexts = nullcontext(), _RestoredBuffers(block)
        output = checkpoint(block, x, *inputs, use_reentrant=False, context_fn=lambda: contexts)
    return output


class _RestoredBuffers:
    """Context that restores a block's buffers: its first run has already updated batch norm's running statistics.

    An object, and not a generator: each backward pass over a retained graph enters it again.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block

    def __enter__(self) -> None:
        self._before = [buffer.clone() for buffer in self._block.buffers()]

    def __exit__(self, *error: object) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._block.buffers(), self._before, strict=True):
                buffer.copy_(value)
        del self._before
