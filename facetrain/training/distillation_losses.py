"""Losses between the embeddings of a network and those of its teacher.

Each function returns this rank's value; the loss over the global batch is the mean of the values over the ranks. The
gradient of the network is the mean over the ranks too, because DDP averages it. All ranks have as many images.
"""

# B local batch   G gathered batch   D embedding   T embedding of the teacher

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from facetrain.distributed import collectives


def cosine_loss(embedding_BT: Tensor, teacher_BT: Tensor) -> Tensor:
    """Return the mean of 1 − cos(embedding, teacher)."""
    return (1 - F.cosine_similarity(embedding_BT, teacher_BT)).mean()


def squared_loss(embedding_BT: Tensor, teacher_BT: Tensor) -> Tensor:
    """Return the mean, over images and elements, of (embedding − teacher)²."""
    return (embedding_BT - teacher_BT).square().mean()


def relational_loss(embedding_BD: Tensor, teacher_BT: Tensor) -> Tensor:
    """Return the mean, over the pairs i ≠ j of the global batch, of (cos s_ij − cos t_ij)². Collective.

    s_ij is the angle of the embeddings of images i and j, t_ij that of the teacher's. Similar to equations 2 to 4 of
    similarity-preserving distillation (Tung and Mori, arXiv 1907.09682), with cosines in place of products whose rows
    are normalized.
    """
    unit_BD, unit_BT = F.normalize(embedding_BD), F.normalize(teacher_BT)
    unit_GD, unit_GT = (collectives.gather(unit).flatten(0, 1) for unit in (unit_BD, unit_BT))
    rows = len(unit_GD)
    # This rank's images against all others. The pairs i = j are 0 up to rounding.
    difference_BG = unit_BD @ unit_GD.T - unit_BT @ unit_GT.T
    value = difference_BG.square().sum() * collectives.world_size() / max(rows * (rows - 1), 1)
    # Image i is in the pairs (i, j), of this rank, and in the pairs (j, i), whose column `gather` has detached. Both
    # have the same gradient: twice the first saves the exchange of the second.
    return 2 * value - value.detach()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": cosine_loss,
    "mse": squared_loss,
    "relational": relational_loss,
}
"""Losses by the names of `distill.loss`."""
