"""Distillation: the loss between a network and its teacher, added to the margin loss.

Each function of `LOSSES` returns this rank's value; the loss over the global batch is the mean of the values over the
ranks. The gradient of the network is the mean over the ranks too, because DDP averages it. All ranks have as many
images.
"""

# B local batch   G gathered batch   D embedding   T embedding of the teacher

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facetrain.data.loader import Batch
from facetrain.distributed import collectives
from facetrain.errors import CheckpointError
from facetrain.training.teacher import Teacher


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


class Distillation(nn.Module):
    """Weighted loss between the embeddings of a network and those of its teacher.

    The losses that compare elements have a learned projection D → T without bias if D ≠ T. It is not part of the
    network that DDP wraps: the optimizer step averages its gradient over the ranks.
    """

    def __init__(self, teacher: Teacher, loss: str, *, weight: float, embedding_size: int, seed: int) -> None:
        """Take the teacher, the name of a loss, its weight, and the length of the network's embeddings.

        `seed` determines the initial projection, which is the same on all ranks.
        """
        super().__init__()
        self.teacher, self._loss, self._weight = teacher, LOSSES[loss], weight
        self.projection: nn.Linear | None = None
        if loss != "relational" and teacher.embedding_size != embedding_size:
            self.projection = nn.Linear(embedding_size, teacher.embedding_size, bias=False)
            generator = torch.Generator().manual_seed(seed)
            nn.init.normal_(self.projection.weight, 0, embedding_size**-0.5, generator=generator)

    def forward(self, batch: Batch, image_BCHW: Tensor, embedding_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's weighted loss, with gradient, and the loss of the global batch, without. Collective.

        Args:
            batch: the micro-batch.
            image_BCHW: its augmented images, float32 (B, 3, H, W) in [−1, 1].
            embedding_BD: the network's embeddings of them, with gradient.
        """
        teacher_BT = self.teacher(batch, image_BCHW)
        projected_BT = embedding_BD if self.projection is None else self.projection(embedding_BD)
        value = self._loss(projected_BT, teacher_BT)
        return self._weight * value, collectives.sum_(value.detach().clone()) / collectives.world_size()

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds: the projection, and the digest of the teacher."""
        digest = torch.frombuffer(bytearray(self.teacher.digest.encode()), dtype=torch.uint8)
        return {**self.state_dict(), "teacher": digest}

    def load_state(self, saved: Mapping[str, Tensor], origin: str) -> None:
        """Load what `state` has returned; nothing for a checkpoint of a run without a teacher.

        Raises:
            CheckpointError: the checkpoint was trained with another teacher. `origin` names it in the message.
        """
        if not saved:
            return
        if bytes(saved["teacher"].tolist()) != self.teacher.digest.encode():
            raise CheckpointError(
                f"{origin}: was trained with another teacher than distill.teacher; restore that model, or start a new "
                "run with model.init_from"
            )
        self.load_state_dict({name: value for name, value in saved.items() if name != "teacher"})
