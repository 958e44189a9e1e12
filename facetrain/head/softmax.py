"""Softmax cross-entropy, log Σ_j exp z_j − z_y, on logits that are computed chunk by chunk.

A rank reduces the logits of its negatives (j ≠ y) to two statistics per sample, chunk by chunk: the largest logit m,
and t = Σ exp(z − b) with a base b. The base is 0 where exp(z) cannot overflow (`is_bounded`), which saves passes over
the logits. Otherwise it is the largest logit so far (`add_chunk`), as in online softmax (Milakov and Gimelshein, arXiv
1805.02867). Joined over the ranks, log Σ exp z = B + log Σ_ranks t·exp(b − B) with B the largest base, so nothing
overflows and no relevant term underflows (`join`). Every rank joins the same numbers in the same order: the results are
equal bit for bit. The target's logit never passes through a chunk, because the margin has changed it and the precision
of the products must not round it; `loss_of` adds it at the end.
"""

# G gathered batch   C classes of a chunk   W world size   P statistics per sample

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_SCALE = 64.0
"""Largest scale for which the base may be 0: e^±64 and a sum of 2³¹ such numbers are normal in float32 and bfloat16."""


def begin(like_G: Tensor) -> Tensor:
    """Return the statistics (P, G) before the first chunk."""
    return torch.stack([torch.full_like(like_G, -torch.inf), torch.zeros_like(like_G)])


def add_chunk(statistics_PG: Tensor, logit_GC: Tensor) -> Tensor:
    """Return the statistics with a chunk's logits added. `logit_GC` is overwritten; target logits in it are −∞."""
    largest_G, total_G = statistics_PG.unbind()
    larger_G = torch.maximum(largest_G, logit_GC.amax(1))
    base_G = _finite(larger_G)
    added_G = logit_GC.sub_(base_G[:, None]).exp_().sum(1)
    # The sum so far counts from the former largest logit: it is scaled to the new one.
    return torch.stack([larger_G, total_G * (largest_G - base_G).exp() + added_G])


def join(statistics_WPG: Tensor, *, bounded: bool) -> Tensor:
    """Return log Σ exp z over the negatives of all ranks, (G,); −∞ if there are none. `bounded`: all bases are 0."""
    largest_WG, total_WG = statistics_WPG.unbind(1)
    if bounded:
        return total_WG.sum(0).log()
    largest_G = _finite(largest_WG.amax(0))
    # All ranks join in the order of their numbers: another order would round differently on each.
    return (total_WG * (largest_WG - largest_G).exp()).sum(0).log() + largest_G


def loss_of(log_negatives_G: Tensor, target_logit_G: Tensor) -> Tensor:
    """Return the loss of each sample: log(1 + Σ_{j≠y} exp z_j / exp z_y)."""
    difference_G = log_negatives_G - target_logit_G
    return torch.logaddexp(difference_G, torch.zeros_like(difference_G))


def log_denominator(target_logit_G: Tensor, loss_G: Tensor, *, bounded: bool) -> Tensor:
    """Return the logarithm of the derivatives' denominator, Σ exp z over all classes, (G,)."""
    log_total_G = target_logit_G + loss_G
    # Bounded chunks divide by it. With a negative it is at least exp(−64). Without any, a target logit below −88 would
    # give 1/0, and NaN times no slope.
    return log_total_G.clamp_min(-LARGEST_SCALE) if bounded else log_total_G


def largest_logit(statistics_WPG: Tensor) -> Tensor:
    """Return the largest logit of the negatives of each sample over all ranks, (G,)."""
    return statistics_WPG[:, 0].amax(0)


def negative_slope_(logit_GC: Tensor, log_total_G: Tensor) -> Tensor:
    """Replace the negatives' logits by the derivatives of the losses, in place; 0 for a logit of −∞."""
    # The softmax of the negatives. In place: a chunk of logits is the largest tensor of a step.
    return logit_GC.sub_(log_total_G[:, None]).exp_()


def target_slope(loss_G: Tensor) -> Tensor:
    """Return the derivative of each loss by its target logit, (G,): the target's probability, less 1."""
    return torch.expm1(-loss_G)


def _finite(largest: Tensor) -> Tensor:
    # If a rank's only class is a sample's target, all of its logits are −∞; −∞ − −∞ would be NaN.
    return largest.clamp_min(torch.finfo(largest.dtype).min)
