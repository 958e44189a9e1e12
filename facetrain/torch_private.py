"""Private torch APIs that facetrain uses; the only module that may import them.

A new torch version may change them without notice, so each entry states the versions it was tested with, why no public
API does the same, and what is gained.

- `FakeTensorMode` (torch 2.11 to 2.13): tensors with shape and device but without memory. `facetrain plan` runs a
  training step on them to count its bytes and operations. The public `meta` device is not enough: autocast ignores
  tensors on it, so 16-bit steps would be counted in 32 bits. Gain: a forecast for any batch size without its memory.
- `TorchDispatchMode` (same versions): intercepts every operation, to follow which tensors exist at the same time. No
  public API reports that on the CPU. torch documents the class in its notes on extending PyTorch.
- `tree_leaves` (same versions): the tensors in the nested arguments of an intercepted operation, in the order and
  with the containers that torch itself knows.
"""

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["FakeTensorMode", "TorchDispatchMode", "tree_leaves"]
