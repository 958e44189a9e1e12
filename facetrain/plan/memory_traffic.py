"""Bytes that a training step reads and writes in a GPU's memory, and kernels that the host launches for it.

Both are counted from the operations that PyTorch dispatches, and from the kernels that are behind each operation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from facetrain.torch_private import TorchDispatchMode, tree_leaves

_NO_KERNEL = frozenset(
    (
        "device",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "_unsafe_view",
    )
)
"""Operations beside views that launch no kernel. `device` reads a property of fake tensors, which real ones have no
operation for."""
_READ_TWICE: dict[str, tuple[int, ...]] = {
    "native_batch_norm": (0,),  # for the statistics, then for the result
    "native_batch_norm_backward": (0, 1),  # for the sums, then for the gradient
    "native_layer_norm_backward": (
        0,
        1,
    ),  # for the gradient of the input, and for the gradients of weight and bias
    "convolution_backward": (0,),  # for the input's gradient, and for the weight's
}
"""Arguments that two kernels of one operation read, each from memory."""
_KERNELS = {
    "native_batch_norm": 3,  # statistics, running statistics, result
    "native_batch_norm_backward": 2,
    "native_layer_norm_backward": 2,
    "convolution_backward": 2,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 2,
}
"""Kernels of an operation, if not one."""


class MemoryTraffic(TorchDispatchMode):
    """Counter of the bytes that operations move and of the kernels that they launch, without fusion.

    Works on real and on fake tensors. Operations inside Triton kernels are not dispatched, so they are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operand_bytes = 0
        """Bytes of the arguments and results of all operations, each counted once."""
        self.bytes = 0
        """Bytes that the kernels of these operations read and write: some read an argument twice."""
        self.launches = 0
        """Kernels that the host launches."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it moves."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _NO_KERNEL:
            moved = sum(_bytes(tensor) for tensor in tree_leaves((args, kwargs, result)))
            # One kernel per gradient, so where only one is wanted, nothing is read twice.
            single = name == "convolution_backward" and sum(args[-1][:2]) < 2
            if single:
                # The input's gradient needs no value of the input, and the weight's none of the weight.
                moved -= _bytes(args[1 if args[-1][0] else 2])
            twice = () if single else _READ_TWICE.get(name, ())
            self.operand_bytes += moved
            self.bytes += moved + sum(_bytes(args[position]) for position in twice)
            self.launches += 1 if single else _KERNELS.get(name, 1)
        return result


def _bytes(value: Any) -> int:
    if not isinstance(value, Tensor):
        return 0
    # An expanded tensor has fewer numbers in memory than in its shape.
    return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())


def weight_bytes(parameters: int, moments: int) -> int:
    """Return the bytes that clipping and the fused optimizer move for the parameters of a network, all in float32.

    Clipping reads the gradient; the optimizer reads gradient, parameter and moments, and writes the last two.
    """
    return parameters * torch.float32.itemsize * (1 + 3 + 2 * moments)
