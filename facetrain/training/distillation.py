"""Distillation: the loss between a network and its teacher, added to the margin loss.

Either 1 − cos of the two embeddings, or the margin loss of a second head, whose fixed class centers are means of the
teacher's embeddings.
"""

# B local batch   D embedding   T embedding of the teacher

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facetrain.data.loading.loader import Batch
from facetrain.distributed import collectives
from facetrain.errors import CheckpointError
from facetrain.head.head_group import Head
from facetrain.training.teacher import LiveTeacher
from facetrain.training.teacher_cache import CachedTeacher

Teacher = LiveTeacher | CachedTeacher
"""Source of the embeddings that a network learns: float32 (B, T), without gradient, not of length 1."""


def cosine_loss(embedding_BT: Tensor, teacher_BT: Tensor) -> Tensor:
    """Return the mean of 1 − cos(embedding, teacher) over this rank's images.

    All ranks have as many images, so the mean of these values over the ranks is the loss of the global batch; DDP
    averages the gradient in the same way.
    """
    return (1 - F.cosine_similarity(embedding_BT, teacher_BT)).mean()


class Distillation(nn.Module):
    """Weighted loss between the embeddings of a network and of its teacher.

    It has a learned projection D → T without bias if D ≠ T. The projection is not part of the network that DDP wraps:
    the optimizer step averages its gradient over the ranks.
    """

    def __init__(
        self,
        teacher: Teacher,
        *,
        weight: float,
        embedding_size: int,
        seed: int,
        margin_weight: float = 1.0,
        centers: Head | None = None,
    ) -> None:
        """Take the teacher, the weight of its loss, and the length of the network's embeddings.

        `seed` determines the initial projection, which is the same on all ranks. `centers` is the head with the
        teacher's class centers for the margin loss; None for the cosine loss.
        """
        super().__init__()
        self.teacher, self._weight = teacher, weight
        self.margin_weight = margin_weight
        """Factor on the margin loss of the trained centers."""
        # In a tuple: the parameters of an attribute would be saved and trained with the projection.
        self._centers = (centers,)
        self.projection: nn.Linear | None = None
        if teacher.embedding_size != embedding_size:
            self.projection = nn.Linear(embedding_size, teacher.embedding_size, bias=False)
            generator = torch.Generator().manual_seed(seed)
            nn.init.normal_(self.projection.weight, 0, embedding_size**-0.5, generator=generator)

    @property
    def centers(self) -> Head | None:
        """Head with the class centers of the teacher; None without one."""
        return self._centers[0]

    def begin_step(self, step: int) -> None:
        """Set stage and random keys of the step."""
        if self.centers is not None:
            # The rate is 0, because no gradient changes these centers; the sample and the margins need the step's
            # number.
            self.centers.begin_step(step, lr=0.0)

    def expect_labels(self, label_B: Tensor) -> None:
        """Start to gather the labels of the next call, as `PartialFC.expect_labels`. Collective."""
        if self.centers is not None:
            self.centers.expect_labels(label_B)

    def forward(self, batch: Batch, image_BCHW: Tensor, embedding_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's weighted loss, with gradient, and the loss of the global batch, without. Collective.

        Args:
            batch: the micro-batch.
            image_BCHW: its augmented images, float32 (B, 3, H, W) in [−1, 1].
            embedding_BD: the network's embeddings of them, with gradient.
        """
        projected_BT = embedding_BD if self.projection is None else self.projection(embedding_BD)
        if self.centers is not None:
            loss = self.centers(projected_BT, batch.label_B)
            return self._weight * loss, loss.detach()
        value = cosine_loss(projected_BT, self.teacher(batch, image_BCHW))
        return self._weight * value, collectives.sum_(value.detach().clone()) / collectives.world_size()

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds: projection, averages of the margin, digest of the teacher."""
        digest = torch.frombuffer(bytearray(self.teacher.digest.encode()), dtype=torch.uint8)
        margin = self.centers.state() if self.centers is not None else {}
        return {
            **self.state_dict(),
            **{f"centers.{name}": value for name, value in margin.items()},
            "teacher": digest,
        }

    def load_state(self, saved: Mapping[str, Tensor], origin: str) -> None:
        """Load what `state` has returned; nothing for a checkpoint of a run without a teacher.

        Raises:
            CheckpointError: the checkpoint was trained with another teacher. `origin` names it in the message.
        """
        if not saved:
            return
        # First of all: with another teacher, the projection has no meaning.
        if bytes(saved["teacher"].tolist()).decode(errors="replace") != self.teacher.digest:
            raise CheckpointError(
                f"{origin}: was trained with another teacher than distill.teacher; restore that model, or start a new "
                "run with model.init_from"
            )
        if self.projection is not None and "projection.weight" in saved:
            self.load_state_dict(
                {name: value for name, value in saved.items() if name.startswith("projection.")}
            )
        if self.centers is not None:
            prefix = "centers."
            self.centers.load_state(
                {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
            )
