"""Group of heads, one per dataset of a mixture: a person who is in two datasets is no negative of theirs.

The group takes the labels of the joined datasets. It gathers the batch once and passes each head the rows of its
dataset, so that every rank sees the same rows for every head: a rank may have no image of a dataset in a step. With n
images in the global batch, of which dataset d has n_d, the loss of a step is

    Σ_d w_d · (n_d / n) · (mean loss of dataset d)

with w_d the weight of the dataset: every image counts the same within a dataset, whatever the composition of the batch.
A head whose dataset has no image in a step does not change in it.
"""

# B local batch   G gathered batch   D embedding   X embedding and norm, or embedding alone

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from facetrain.distributed import collectives
from facetrain.head.gathered_batch import LabelGather, check_labels, start_gather
from facetrain.head.margin_head import MarginHead
from facetrain.head.sampling import SampledClasses, to_device


@dataclass(frozen=True)
class HeadPart:
    """Head of one dataset, and its place in a group."""

    head: MarginHead
    first_class: int = 0
    """Label in the group of the head's class 0."""
    loss_weight: float = 1.0
    """Factor on the loss of the dataset's images."""
    share: float = 1.0
    """Fraction of the images of an epoch that are of the dataset."""

    @property
    def shard(self) -> tuple[int, int]:
        """Classes of this rank, [start, stop), as labels of the group."""
        return self.first_class + self.head.shard.start, self.first_class + self.head.shard.stop


class HeadGroup:
    """Several heads with the interface of one `MarginHead`, for labels that count the classes of all of them."""

    def __init__(
        self, heads: Sequence[MarginHead], loss_weights: Sequence[float], shares: Sequence[float]
    ) -> None:
        """Take the heads in the order of their classes, with a weight of the loss and a share of the images each."""
        self._first = np.cumsum([0, *(head.num_classes for head in heads)])
        self.parts = tuple(
            HeadPart(head, int(first), weight, share)
            for head, first, weight, share in zip(heads, self._first[:-1], loss_weights, shares, strict=True)
        )
        self.num_classes = int(self._first[-1])
        self.embedding_size = heads[0].embedding_size
        self.update_in_backward = heads[0].update_in_backward
        self.on_device = heads[0].on_device
        self._needs_norms = any(head.margin.needs_norms for head in heads)
        self._labels = LabelGather()

    def begin_step(self, step: int, *, lr: float, loss_scale: Tensor | None = None) -> None:
        """Start a step of all heads, as `MarginHead.begin_step`."""
        for part in self.parts:
            part.head.begin_step(step, lr=lr, loss_scale=loss_scale)

    def __call__(
        self, embedding_BD: Tensor, label_B: Tensor, teacher: collectives.GatheredRows | None = None
    ) -> Tensor:
        """Return the weighted loss of the global batch; a scalar, the same on every rank.

        Centers that follow a `teacher` move first, as in `MarginHead`. Collective: every rank must pass the same number
        of rows.

        Raises:
            DataError: a label on the host is outside [0, num_classes).
        """
        if label_B.device.type == "cpu":
            self.check_labels(label_B.numpy())
        label_G = self._labels.gather(label_B).cpu().numpy()
        gathered = start_gather(embedding_BD, with_norms=self._needs_norms)
        # The composition of the batch is known on the host, so all ranks pass over the same heads.
        number_G = np.searchsorted(self._first, label_G, side="right") - 1
        order = np.argsort(number_G, kind="stable")
        counts = np.bincount(number_G, minlength=len(self.parts)).tolist()
        label_of_part = np.split(label_G[order], np.cumsum(counts)[:-1])
        sampled = [
            self._sample(part, label, embedding_BD.device) if len(label) else None
            for part, label in zip(self.parts, label_of_part, strict=True)
        ]
        order_G = to_device(order, embedding_BD.device)
        if teacher is not None:
            rows_of_part = teacher.wait().index_select(0, order_G).split(counts)
            for part, label, rows_GX in zip(self.parts, label_of_part, rows_of_part, strict=True):
                if len(label):
                    part.head.follow_teacher(torch.from_numpy(label - part.first_class), rows_GX)
        # After the samples are drawn: drawing needs no embeddings, and overlaps with their gather.
        sorted_GX = gathered.wait().index_select(0, order_G)
        losses = [
            self._loss(part, rows_GX, classes, len(label_G))
            * (part.loss_weight * len(rows_GX) / len(label_G))
            for part, rows_GX, classes in zip(self.parts, sorted_GX.split(counts), sampled, strict=True)
            if classes is not None
        ]
        return torch.stack(losses).sum()

    def expect_labels(self, label_B: Tensor) -> None:
        """Start to gather the labels of the next call, as `MarginHead.expect_labels`. Collective."""
        self._labels.expect(label_B)

    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        """Update the centers of all heads by their accumulated gradients, as `MarginHead.step`."""
        for part in self.parts:
            part.head.step(grad_scale, skip)

    def take_nearest(self) -> tuple[int, int]:
        """Return how many samples had the nearest target class, and of how many, since the last call. Collective."""
        nearest, images = zip(*(part.head.take_nearest() for part in self.parts), strict=True)
        return sum(nearest), sum(images)

    def check_labels(self, labels: np.ndarray) -> None:
        """Check that every label is a class of the group.

        Raises:
            DataError: one is not.
        """
        check_labels(labels, self.num_classes)

    def load_rows(self, read: Callable[[str, int, int], Tensor]) -> None:
        """Load saved tables; `read(name, start, stop)` returns the rows of the group's classes [start, stop)."""
        for part in self.parts:

            def read_part(name: str, start: int, stop: int, first: int = part.first_class) -> Tensor:
                return read(name, first + start, first + stop)

            part.head.load_rows(read_part)

    def state(self) -> dict[str, Tensor]:
        """Return the averages and thresholds of all heads, named `NUMBER.NAME`."""
        return {
            f"{number}.{name}": tensor
            for number, part in enumerate(self.parts)
            for name, tensor in part.head.state().items()
        }

    def load_state(self, saved: dict[str, Tensor]) -> None:
        """Load what `state` returned; entries missing in `saved` keep their values."""
        for name, tensor in self.state().items():
            if name in saved:
                tensor.copy_(saved[name])

    def _sample(self, part: HeadPart, label: np.ndarray, device: torch.device) -> SampledClasses:
        head_label = label - part.first_class
        head = part.head
        return head.sample_classes(
            torch.from_numpy(head_label) if head.reads_labels else to_device(head_label, device)
        )

    def _loss(self, part: HeadPart, rows_GX: Tensor, sampled: SampledClasses, global_batch: int) -> Tensor:
        unit_GD = rows_GX[:, : self.embedding_size]
        norm_G = rows_GX[:, -1] if part.head.margin.needs_norms else None
        return part.head.loss_of_gathered(unit_GD, norm_G, sampled, global_batch=global_batch)


Head = MarginHead | HeadGroup
"""Head of a run."""


def head_parts(head: Head) -> Iterator[HeadPart]:
    """Yield the heads of a group, or a single head as the only part."""
    yield from head.parts if isinstance(head, HeadGroup) else (HeadPart(head),)
