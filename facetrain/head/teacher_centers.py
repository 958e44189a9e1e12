"""Class centers that follow the embeddings of a teacher (AdaDistill, Boutros et al., ECCV 2024, arXiv 2407.01332).

An image of class y with the student's embedding s, the teacher's embedding t and the class center w moves the center by

    w ← a·w + (1 − a)·t        a = clamp( cos(s, t) · clamp(cos(w, t), 10⁻⁶, 1), 10⁻⁶, 1 )

(section 3, in the form with the weight of hard images, `adaptive_alpha` of the authors' code). t has length 1, and the
loss does not depend on the length of w. The centers move before the loss of the batch is computed, as in that code. A
center that is still far from the teacher's embeddings, or a student that does not follow them yet, gives a small a: the
center is then nearly the embedding of the last image.

If a batch has several images of one class, all their factors a are computed from the center before the batch, as in the
authors' code, and the moves follow each other in the order of the images in the global batch, which is the same for any
number of ranks. The authors' code keeps one of these moves, on a GPU an arbitrary one, and its ranks have different
centers.
"""

# B local batch   G gathered batch   T embedding of the teacher   X embedding and cosine

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.distributed.collectives import GatheredRows
from facetrain.head.class_centers import RowTable
from facetrain.head.class_shard import ClassShard
from facetrain.head.sampling import on_device

_SMALLEST_FACTOR = 1e-6


def start_teacher_gather(student_BT: Tensor, teacher_BT: Tensor) -> GatheredRows:
    """Start to gather the teacher's unit embeddings, each followed by cos(student, teacher): (G, X). Collective."""
    student_BT, teacher_BT = (
        F.normalize(x_BT.detach().to(torch.promote_types(x_BT.dtype, torch.float32)))
        for x_BT in (student_BT, teacher_BT)
    )
    cos_B = torch.linalg.vecdot(student_BT, teacher_BT)
    return GatheredRows(torch.cat([teacher_BT, cos_B[:, None]], dim=1))


@torch.no_grad()
def follow_teacher(centers: RowTable, shard: ClassShard, label_G: Tensor, teacher_GX: Tensor) -> None:
    """Move this rank's centers of the classes of a gathered batch.

    An image whose cosine is not finite moves nothing. Never waits for a GPU, unless the centers are on another device.

    Args:
        centers: table of the shard's centers.
        shard: this rank's classes.
        label_G: class of each image, int64; on the host if the centers are there, else on any device.
        teacher_GX: result of `start_teacher_gather`.
    """
    if not shard.size:
        return
    device = teacher_GX.device
    if not centers.is_elsewhere:
        label_G = on_device(label_G, device)
    # Images of one class are neighbors, in the order of the batch.
    label_G, order_G = label_G.sort(stable=True)
    is_local_G = (label_G >= shard.start) & (label_G < shard.stop)
    row_G = torch.where(is_local_G, label_G - shard.start, 0)
    first_G, past_G = (
        on_device(torch.searchsorted(label_G, label_G, right=right), device) for right in (False, True)
    )
    teacher_GX = teacher_GX.index_select(0, on_device(order_G, device))
    unit_GT, cos_G = teacher_GX[:, :-1], teacher_GX[:, -1]
    center_GT = centers.fetch(row_G).to(unit_GT.dtype)

    moves_G = on_device(is_local_G, device) & torch.isfinite(cos_G)
    cos_center_G = F.cosine_similarity(center_GT, unit_GT).clamp(_SMALLEST_FACTOR, 1)
    factor_G = torch.where(moves_G, (cos_G * cos_center_G).clamp(_SMALLEST_FACTOR, 1), 1)
    # In float64, because the products are differences of sums over the whole batch.
    log_G = factor_G.double().log()
    # A product of a range is the exponential of a difference of sums: no loop over the images of a class.
    sum_G = log_G.cumsum(0)
    later_G = (sum_G[past_G - 1] - sum_G).exp()  # product of the factors of the later images of the class
    kept_G = (sum_G[past_G - 1] - sum_G[first_G] + log_G[first_G]).exp()  # product of all of them
    weight_G1 = ((1 - factor_G.double()) * later_G).to(unit_GT.dtype)[:, None]
    added_GT = torch.zeros_like(unit_GT).index_add_(
        0, first_G, torch.where(moves_G[:, None], weight_G1 * unit_GT, 0)
    )
    moved_GT = center_GT * kept_G.to(unit_GT.dtype)[:, None] + added_GT[first_G]

    # The images of a class have the same row and the same result. Those of other ranks' classes repeat an image of this
    # rank: to select by the content, the host would have to wait for a GPU. Without one, row 0 is written as it is.
    place_G = torch.arange(len(label_G), device=label_G.device)
    repeated_G = torch.where(is_local_G, place_G, is_local_G.int().argmax())
    centers.store(row_G[repeated_G], moved_GT[on_device(repeated_G, device)])
