"""Softmax cross-entropy, log Σ_j exp z_j − z_y, on logits that are computed chunk by chunk.

A rank reduces its logits to two statistics per sample, chunk by chunk: the largest logit m and t = Σ exp(z − m), the
target's included (`begin`, `add_chunk`). Joined over the ranks, log Σ exp z = M + log Σ_ranks t·exp(m − M) with M the
largest m, so nothing overflows and no relevant term underflows (`join`). Every rank joins the same numbers in the same
order: the results are equal bit for bit. The backward pass asks for the derivative of the loss by each logit
(`negative_slope_`, `target_slope`).
"""

# G gathered batch   C classes of a chunk   W world size   P statistics per sample

from __future__ import annotations

import torch
from torch import Tensor


def begin(target_logit_G: Tensor) -> Tensor:
    """Return the statistics (P, G) before the first chunk. The target logit is −∞ if another rank has it."""
    # The target's own term: with its logit as the largest one, exp(z − m) is 1. It never passes through a chunk,
    # because the margin has changed it and the precision of the products must not round it.
    return torch.stack([target_logit_G, (target_logit_G > -torch.inf).to(target_logit_G.dtype)])


def add_chunk(statistics_PG: Tensor, logit_GC: Tensor) -> Tensor:
    """Return the statistics with a chunk's logits added. `logit_GC` is overwritten; target logits in it are −∞."""
    largest_G, total_G = statistics_PG.unbind()
    larger_G = torch.maximum(largest_G, logit_GC.amax(1))
    base_G = _finite(larger_G)
    added_G = logit_GC.sub_(base_G[:, None]).exp_().sum(1)
    # The sum so far counts from the former largest logit: it is scaled to the new one.
    return torch.stack([larger_G, total_G * (largest_G - base_G).exp() + added_G])


def join(statistics_WPG: Tensor, target_logit_G: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each sample from the statistics of all ranks, and what the slopes need; (G,) each."""
    largest_WG, total_WG = statistics_WPG.unbind(1)
    largest_G = _finite(largest_WG.amax(0))
    # All ranks join in the order of their numbers: another order would round differently on each.
    log_total_G = (total_WG * (largest_WG - largest_G).exp()).sum(0).log() + largest_G
    return log_total_G - target_logit_G, log_total_G


def largest_logit(statistics_WPG: Tensor) -> Tensor:
    """Return the largest logit of each sample over all ranks, (G,)."""
    return statistics_WPG[:, 0].amax(0)


def negative_slope_(logit_GC: Tensor, joined_G: Tensor) -> Tensor:
    """Replace the negatives' logits by the derivatives of the losses, in place; 0 for a logit of −∞."""
    # The softmax of the negatives. In place: a chunk of logits is the largest tensor of a step.
    return logit_GC.sub_(joined_G[:, None]).exp_()


def target_slope(target_logit_G: Tensor, joined_G: Tensor) -> Tensor:
    """Return the derivative of each loss by its target logit, (G,)."""
    # The target's probability, less 1.
    return (target_logit_G - joined_G).exp() - 1


def _finite(largest: Tensor) -> Tensor:
    # If a rank's only class is a sample's target, all of its logits are −∞; −∞ − −∞ would be NaN.
    return largest.clamp_min(torch.finfo(largest.dtype).min)
