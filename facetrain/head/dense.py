"""The head in plain PyTorch: one process, all logits at once, gradients by autograd. Read this file first.

The other files compute the same loss and gradients with the classes split over ranks and passed over in
chunks. The tests compare them with this file, in float64.
"""

# G batch   D embedding   K classes   S sampled of K

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_loss(
    embedding_GD: Tensor,
    center_KD: Tensor,
    label_G: Tensor,
    margin: Callable[[Tensor], Tensor],
    *,
    scale: float = 64.0,
    filter_threshold: float = 0.0,
    class_S: Tensor | None = None,
) -> Tensor:
    """Return the mean over the batch of −log(exp z_y / Σ_j exp z_j), a scalar; z are the logits, y the label.

    Args:
        embedding_GD: embeddings of any length.
        center_KD: class centers of any length.
        label_G: class of each embedding, int64.
        margin: function of the target cosines (G,), such as `lambda cos: cos - 0.4`.
        scale: factor on the cosines.
        filter_threshold: see `dense_logits`.
        class_S: classes that take part (Partial FC), ascending, with all labels among them; None: all.
    """
    if class_S is not None:
        center_KD, label_G = center_KD[class_S], torch.searchsorted(class_S, label_G)
    cos_GK = F.normalize(embedding_GD) @ F.normalize(center_KD).T
    return F.cross_entropy(dense_logits(cos_GK, label_G, margin, scale, filter_threshold), label_G)


def dense_logits(
    cos_GK: Tensor,
    label_G: Tensor,
    margin: Callable[[Tensor], Tensor],
    scale: float = 64.0,
    filter_threshold: float = 0.0,
) -> Tensor:
    """Return the logits: scale · margin(cos) of the target class, scale · cos of the others, the negatives.

    A negative whose cosine exceeds `filter_threshold` counts as label noise and gets the logit 0; 0: no filter.
    """
    target_G = margin(cos_GK.gather(1, label_G[:, None])[:, 0])
    negative_GK = cos_GK
    if filter_threshold:
        negative_GK = torch.where(cos_GK > filter_threshold, 0.0, cos_GK)
    is_target_GK = F.one_hot(label_G, cos_GK.shape[1]).bool()
    return torch.where(is_target_GK, target_G[:, None], negative_GK) * scale
