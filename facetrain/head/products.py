"""Matrix products of the head: on a CPU in float32 by oneDNN.

torch gives float32 products on a CPU to MKL, which on AMD's processors does not use AVX-512: half the speed of
oneDNN's kernels, which are in the same build. Both compute with the same float32 multiply-adds, in another order; on
Intel's processors they are equally fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from facetrain.torch_private import onednn_linear


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return a·b, (M, N)."""
    return product_with_transposed(a_MK, b_KN.T)


def product_with_transposed(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Return a·bᵀ, (M, N)."""
    if (
        onednn_linear is None
        or a_MK.dtype != torch.float32
        or a_MK.device.type != "cpu"
        or not torch.backends.mkldnn.is_available()
    ):
        return a_MK @ b_NK.T
    # oneDNN reads its first factor by rows: a copy costs less than its slow kernel for columns.
    return onednn_linear(a_MK.contiguous(), b_NK)


def transposed_product(a_KM: Tensor, b_KN: Tensor) -> Tensor:
    """Return aᵀ·b, (M, N)."""
    return product_with_transposed(a_KM.T, b_KN.T)
