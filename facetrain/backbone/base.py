"""What every backbone offers, and what they are built of."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Backbone(nn.Module):
    """A network from faces to embeddings, in two halves.

    The trunk may run in 16 bits; the neck, whose sums run over tens of thousands of features, runs
    in float32. Whoever wraps the network decides on that: nothing here knows of autocast.
    """

    embedding_size: int

    def trunk(self, image_BCHW: Tensor) -> Tensor:
        """Map normalised images (B, 3, H, W) to features."""
        raise NotImplementedError

    def neck(self, feature: Tensor) -> Tensor:
        """Map the trunk's features to embeddings (B, D)."""
        raise NotImplementedError

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map normalised images (B, 3, H, W) to embeddings (B, D)."""
        return self.neck(self.trunk(image_BCHW))


def run_block(block: Callable[[Tensor], Tensor], x: Tensor, *, again: bool) -> Tensor:
    """Run a block; with `again`, keep only its input and run it once more in the backward pass."""
    return checkpoint(block, x, use_reentrant=False) if again and x.requires_grad else block(x)
