"""Matrix products by the fastest routine that torch carries.

On a CPU torch gives float32 products to MKL, which on AMD's processors does not use AVX-512: less than
half the speed of oneDNN's kernels. Those are in the same build, under the name by which torch.compile
calls them, and compute with the same float32 multiply-adds.
"""

from __future__ import annotations

import torch
from torch import Tensor


def times(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return a·b, (M, N)."""
    return _linear(a_MK, b_KN.T) if _by_onednn(a_MK) else a_MK @ b_KN


def times_transposed(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Return a·bᵀ, (M, N)."""
    return _linear(a_MK, b_NK) if _by_onednn(a_MK) else a_MK @ b_NK.T


def transposed_times(a_KM: Tensor, b_KN: Tensor) -> Tensor:
    """Return aᵀ·b, (M, N)."""
    # oneDNN reads its first factor by rows.
    return _linear(a_KM.T.contiguous(), b_KN.T) if _by_onednn(a_KM) else a_KM.T @ b_KN


def _by_onednn(x: Tensor) -> bool:
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _linear(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, None, "none", [], "")
    return product
