"""Random draws of what a network drops, each from the key of its sample: dropout and stochastic depth.

The draws depend on the sample's key alone: not on the rank, a restart, the rest of the batch, or whether a block is
recomputed in the backward pass.
"""

# B batch   L blocks

from __future__ import annotations

import torch
from torch import Tensor

from facetrain.counter_rng import hash64, uniform

# Keys of independent draws from one sample's key.
_BRANCHES, _FEATURES = 0, 1
_LEVELS = 1 << 16
"""Values of a draw of dropout. A hash of 64 bits gives four draws, for a quarter of the work."""


def dropout(x: Tensor, probability: float, key_B: Tensor) -> Tensor:
    """Set features (B, …) to 0 with a probability, and divide the others by the probability to be kept.

    `key_B` are the samples' keys, int64. The probability is rounded to a multiple of 2^-16.
    """
    dropped = min(round(probability * _LEVELS), _LEVELS - 1)
    features = x[0].numel()
    counter_BQ = key_B[:, None] + torch.arange(-(-features // 4), device=key_B.device)
    # Signed integers, uniform from -2^15 on.
    draw = hash64(counter_BQ, _FEATURES).view(torch.int16)[:, :features].reshape(x.shape)
    return torch.where(draw >= dropped - _LEVELS // 2, x, 0.0) * (_LEVELS / (_LEVELS - dropped))


def drop_path_scales(last: float, depth: int, key_B: Tensor) -> Tensor:
    """Return the factors of stochastic depth (Huang et al., arXiv 1603.09382) on the branches, float64 (depth, 2, B).

    A branch is dropped for a sample with a probability that grows from 0 in the first block to `last`: its factor is 0,
    or 1 / (1 − probability) if it is kept.
    """
    branch_L21 = torch.arange(2 * depth, device=key_B.device).view(-1, 2, 1)
    probability_L11 = torch.arange(depth, dtype=torch.float64, device=key_B.device).view(-1, 1, 1)
    probability_L11 = probability_L11 * (last / (depth - 1))
    return (uniform(key_B + branch_L21, _BRANCHES) >= probability_L11) / (1 - probability_L11)


def random_keys(image_BCHW: Tensor) -> Tensor:
    """Return keys for images of unknown samples, int64 (B,)."""
    return torch.randint(1 << 62, (len(image_BCHW),), device=image_BCHW.device)
