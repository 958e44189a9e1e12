"""Distillation: the loss between a network and its teacher, added to the margin loss.

The losses of `CENTER_LOSSES` are the margin loss of a second head, whose class centers come from the teacher.

Each function of `LOSSES` returns this rank's value; the loss over the global batch is the mean of the values over the
ranks. The gradient of the network is the mean over the ranks too, because DDP averages it. All ranks have as many
images.
"""

# B local batch   G gathered batch   D embedding   T embedding of the teacher

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facetrain.data.loading.loader import Batch
from facetrain.distributed import collectives
from facetrain.errors import CheckpointError
from facetrain.head.head_group import Head, head_parts
from facetrain.head.teacher_centers import start_teacher_gather
from facetrain.training.teacher import Teacher


def cosine_loss(embedding_BT: Tensor, teacher_BT: Tensor) -> Tensor:
    """Return the mean of 1 − cos(embedding, teacher)."""
    return (1 - F.cosine_similarity(embedding_BT, teacher_BT)).mean()


def squared_loss(embedding_BT: Tensor, teacher_BT: Tensor) -> Tensor:
    """Return the mean, over images and elements, of (embedding − teacher)²."""
    return (embedding_BT - teacher_BT).square().mean()


def relational_loss(embedding_BD: Tensor, teacher_BT: Tensor) -> Tensor:
    """Return the mean, over the pairs i ≠ j of the global batch, of (cos s_ij − cos t_ij)². Collective.

    s_ij is the angle between the embeddings of images i and j, t_ij the teacher's angle. Similar to equations 2 to 4 of
    similarity-preserving distillation (Tung and Mori, arXiv 1907.09682), with cosines in place of products whose rows
    are normalized.
    """
    unit_BD, unit_BT = F.normalize(embedding_BD), F.normalize(teacher_BT)
    # Without gradient: each rank's rows have theirs in the pairs of this rank, see below.
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
"""Losses of embeddings, by the names of `distill.loss`."""
CENTER_LOSSES = ("fixed_centers", "adaptive_centers")
"""Further values of `distill.loss`: the margin loss with class centers of the teacher."""
_ROWS = "teacher_"
"""Prefix of the tables of the teacher's class centers in a checkpoint, beside the trained ones."""


class Distillation(nn.Module):
    """Weighted loss between the embeddings of a network and of its teacher.

    All losses but `relational` have a learned projection D → T without bias if D ≠ T. It is not part of the network
    that DDP wraps: the optimizer step averages its gradient over the ranks.
    """

    def __init__(
        self,
        teacher: Teacher,
        loss: str,
        *,
        weight: float,
        embedding_size: int,
        seed: int,
        margin_weight: float = 1.0,
        centers: Head | None = None,
    ) -> None:
        """Take the teacher, the name of a loss, its weight, and the length of the network's embeddings.

        `seed` determines the initial projection, which is the same on all ranks. `centers` is the head with the
        teacher's class centers, for a loss of `CENTER_LOSSES`.
        """
        super().__init__()
        self.teacher, self._loss, self._weight = teacher, loss, weight
        self.margin_weight = margin_weight
        """Factor on the margin loss of the trained centers."""
        self.centers = centers
        """Head with the class centers of the teacher; None without one."""
        self.projection: nn.Linear | None = None
        if loss != "relational" and teacher.embedding_size != embedding_size:
            self.projection = nn.Linear(embedding_size, teacher.embedding_size, bias=False)
            generator = torch.Generator().manual_seed(seed)
            nn.init.normal_(self.projection.weight, 0, embedding_size**-0.5, generator=generator)

    def begin_step(self, step: int) -> None:
        """Start a step: draw the classes whose centers take part in it."""
        if self.centers is not None:
            # The rate is 0, because no gradient changes these centers; the sample and the margins need the step's
            # number.
            self.centers.begin_step(step, lr=0.0)

    def expect_labels(self, label_B: Tensor) -> None:
        """Start to gather the labels of the next call, as `MarginHead.expect_labels`. Collective."""
        if self.centers is not None:
            self.centers.expect_labels(label_B)

    def forward(self, batch: Batch, image_BCHW: Tensor, embedding_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's weighted loss, with gradient, and the loss of the global batch, without. Collective.

        Args:
            batch: the micro-batch.
            image_BCHW: its augmented images, float32 (B, 3, H, W) in [−1, 1].
            embedding_BD: the network's embeddings of them, with gradient.
        """
        teacher_BT = self.teacher(batch, image_BCHW)
        projected_BT = embedding_BD if self.projection is None else self.projection(embedding_BD)
        if self.centers is not None:
            # The gather begins before the centers are sampled, and arrives in the meantime.
            follows = self._loss == "adaptive_centers"
            gathered = start_teacher_gather(projected_BT, teacher_BT) if follows else None
            # The centers move by the teacher's embeddings first, then the loss is computed with them, as in the
            # authors' code.
            loss = self.centers(projected_BT, batch.label_B, gathered)
            return self._weight * loss, loss.detach()
        value = LOSSES[self._loss](projected_BT, teacher_BT)
        return self._weight * value, collectives.sum_(value.detach().clone()) / collectives.world_size()

    def row_states(self) -> Iterator[dict[str, Tensor]]:
        """Yield the tables of class centers to save beside each trained head's; none if they do not change."""
        if self.centers is not None and self._loss == "adaptive_centers":
            for part in head_parts(self.centers):
                yield {_ROWS + name: table for name, table in part.head.row_state().items()}

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds beside the tables: projection, margin's averages, digest of the teacher."""
        digest = torch.frombuffer(bytearray(self.teacher.digest.encode()), dtype=torch.uint8)
        margin = self.centers.state() if self.centers is not None else {}
        # The tables are read only if the checkpoint is of a run with the same loss.
        loss = torch.frombuffer(bytearray(self._loss.encode()), dtype=torch.uint8)
        return {
            **self.state_dict(),
            **{f"centers.{name}": value for name, value in margin.items()},
            "teacher": digest,
            "loss": loss,
        }

    def load_state(
        self, saved: Mapping[str, Tensor], read_rows: Callable[[str, int, int], Tensor], origin: str
    ) -> None:
        """Load what `state` and `row_states` have returned; nothing for a checkpoint of a run without a teacher.

        `read_rows(name, start, stop)` returns the rows of classes [start, stop) of a table.

        Raises:
            CheckpointError: the checkpoint was trained with another teacher. `origin` names it in the message.
        """
        if not saved:
            return
        # First of all: with another teacher, neither the projection nor the centers have a meaning.
        if _text(saved["teacher"]) != self.teacher.digest:
            raise CheckpointError(
                f"{origin}: was trained with another teacher than distill.teacher; restore that model, or start a new "
                "run with model.init_from"
            )
        if self.projection is not None and "projection.weight" in saved:
            self.load_state_dict(
                {name: value for name, value in saved.items() if name.startswith("projection.")}
            )
        # Another loss has other centers: they begin as in a new run.
        if self.centers is None or _text(saved["loss"]) != self._loss:
            return
        prefix = "centers."
        self.centers.load_state(
            {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
        )
        if self._loss == "adaptive_centers":
            self.centers.load_rows(lambda name, start, stop: read_rows(_ROWS + name, start, stop))


def _text(encoded: Tensor) -> str:
    """Return the text in a uint8 tensor."""
    return bytes(encoded.tolist()).decode(errors="replace")
