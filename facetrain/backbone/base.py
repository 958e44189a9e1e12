"""Base class of the backbones."""

# B batch   D embedding

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch import Tensor, nn

from facetrain.backbone.sample_draws import dropout, random_keys

DEFAULT_IMAGE_SIZE = 112
"""Pixels a side of the images of a network whose description states none."""


class Backbone(nn.Module):
    """Network from face images to embeddings, in two halves.

    The trunk may run in 16 bits. The neck runs in float32, because it sums over tens of thousands of features. The
    wrapper that trains or evaluates the network sets these precisions (`training/precision.py`); a backbone contains no
    autocast.
    """

    takes_landmarks: ClassVar[bool] = False
    """Whether `trunk` and `forward` take a second argument: the landmarks of the faces, (B, 5, 2), in units of the
    image's sides, see `face_landmarks.py`. Without it they use the landmarks of aligned faces."""

    def __init__(
        self,
        *,
        embedding_size: int = 512,
        image_size: int = DEFAULT_IMAGE_SIZE,
        dropout: float = 0.0,
        checkpoint_activations: bool = False,
    ) -> None:
        """Take the options of every backbone, which the section `model` of the config describes."""
        super().__init__()
        self.embedding_size, self.image_size = embedding_size, image_size
        self._dropout, self._recompute = dropout, checkpoint_activations
        self.new_layers: tuple[str, ...] = ()
        """Prefixes of the parameters that the published weights lack; they are trained whole beside adapters."""

    @property
    def draws_by_sample(self) -> bool:
        """Whether `trunk` takes `key_B` in training: a random key of each sample, int64 (B,).

        From it, it draws what it drops. Without it, it draws keys.
        """
        return self._dropout > 0

    def drop(self, x: Tensor, key_B: Tensor | None) -> Tensor:
        """Apply dropout to features (B, …) of samples with these keys, see `draws_by_sample`, in training."""
        if not self.training or not self._dropout:
            return x
        return dropout(x, self._dropout, random_keys(x) if key_B is None else key_B)

    def trunk(self, image_BCHW: Tensor) -> Tensor:
        """Map normalized images (B, 3, H, W) to features."""
        raise NotImplementedError

    def neck(self, feature: Tensor) -> Tensor:
        """Map the trunk's features to embeddings (B, D)."""
        raise NotImplementedError

    def regions(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the trunk's modules in order, each with the name of its method that maps (B, …) to (B, …).

        The method may take further tensors after the first one.
        With `train.compile` each of these methods is compiled on its own; modules with the same code share one
        compilation. The base class yields the trunk as a whole.
        """
        yield self, "trunk"

    def last_layers(self) -> tuple[str, ...]:
        """Return the prefixes of the parameter names of the last layers, which Muon leaves to the other optimizer.

        The base class takes the last child with a weight matrix: of the backbone, or of its only such child, and so on.
        """
        prefix, children = "", _children_with_matrices(self)
        while len(children) == 1:
            [(name, child)] = children.items()
            prefix, children = f"{prefix}{name}.", _children_with_matrices(child)
        return (f"{prefix}{[*children][-1]}." if children else prefix,)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map normalized images (B, 3, H, W) to embeddings (B, D)."""
        return self.neck(self.trunk(image_BCHW))


def _children_with_matrices(module: nn.Module) -> dict[str, nn.Module]:
    # A batch norm after the layer of the embeddings is no layer of its own.
    return {
        name: child
        for name, child in module.named_children()
        if any(parameter.dim() > 1 for parameter in child.parameters())
    }


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch a network to evaluation mode, and restore the mode of every module at the end.

    `model.train()` at the end would be wrong: modules that the caller keeps in evaluation mode, such as
    frozen batch norms, would change theirs.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
