"""What every backbone offers, and what they are built of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Backbone(nn.Module):
    """A network from faces to embeddings, in two halves.

    The trunk may run in 16 bits; the neck, whose sums run over tens of thousands of features, runs
    in float32. Whoever wraps the network decides on that: nothing here knows of autocast.
    """

    embedding_size: int

    def trunk(self, image_BCHW: Tensor) -> Tensor:
        """Map normalized images (B, 3, H, W) to features."""
        raise NotImplementedError

    def neck(self, feature: Tensor) -> Tensor:
        """Map the trunk's features to embeddings (B, D)."""
        raise NotImplementedError

    def regions(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the modules of which the trunk is made, each with the name of its method that maps (B, …) to (B, …).

        They are what is compiled: one after the other, and once where several are alike.
        """
        raise NotImplementedError

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map normalized images (B, 3, H, W) to embeddings (B, D)."""
        return self.neck(self.trunk(image_BCHW))


def run_block(block: nn.Module, x: Tensor, *, again: bool) -> Tensor:
    """Run a block; with `again`, keep only its input and run it once more in the backward pass."""
    if not (again and x.requires_grad):
        output: Tensor = block(x)
    else:
        contexts = nullcontext(), _buffers_kept(block)
        output = checkpoint(block, x, use_reentrant=False, context_fn=lambda: contexts)
    return output


@contextmanager
def _buffers_kept(block: nn.Module) -> Iterator[None]:
    """Within, a block may change its buffers: batch norms have counted this batch before."""
    before = [buffer.clone() for buffer in block.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(block.buffers(), before, strict=True):
                buffer.copy_(value)
