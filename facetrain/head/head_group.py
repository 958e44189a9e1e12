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

from facetrain.device.page_locked import to_device
from facetrain.distributed import collectives
from facetrain.head.base_head import BaseHead
from facetrain.head.partial_fc import PartialFC


@dataclass(frozen=True)
class HeadPart:
    """Head of one dataset, and its place in a group."""

    head: PartialFC
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


class HeadGroup(BaseHead):
    """Several heads with the interface of one, for labels that count the classes of all of them."""

    reads_labels = True

    def __init__(
        self, heads: Sequence[PartialFC], loss_weights: Sequence[float], shares: Sequence[float]
    ) -> None:
        """Take the heads in the order of their classes, with a weight of the loss and a share of the images each."""
        super().__init__()
        self.group = heads[0].group
        self._first = np.cumsum([0, *(head.num_classes for head in heads)])
        self.parts = tuple(map(HeadPart, heads, self._first[:-1].tolist(), loss_weights, shares))
        self.num_classes = int(self._first[-1])
        self.embedding_size, self.on_device = heads[0].embedding_size, heads[0].on_device
        self.update_in_backward = heads[0].update_in_backward

    @property
    def needs_norms(self) -> bool:
        return any(part.head.needs_norms for part in self.parts)

    def begin_step(self, step: int, *, lr: float, loss_scale: Tensor | None = None) -> None:
        for part in self.parts:
            part.head.begin_step(step, lr=lr, loss_scale=loss_scale)

    def _loss_of(self, label_G: Tensor, gathered: collectives.GatheredRows) -> Tensor:
        # The composition of the batch is known on the host, so all ranks pass over the same heads.
        label, device = label_G.numpy(), self.parts[0].head.device
        # The dataset of each image: the labels of a dataset are consecutive.
        number_G = np.searchsorted(self._first, label, side="right") - 1
        # Stable: the rows of a dataset keep the order of the batch, by which random margins are drawn.
        order = np.argsort(number_G, kind="stable")
        counts = np.bincount(number_G, minlength=len(self.parts)).tolist()
        # One permutation and one split, instead of a selection by each dataset, whose size the device would have to
        # report.
        order_G = to_device(order, device)
        labels = torch.from_numpy(label[order] - self._first[number_G[order]]).split(counts)
        # A head without images takes no part, on any rank: its centers neither move nor decay.
        present = [place for place, count in enumerate(counts) if count]
        sampled = {place: self.parts[place].head.sample_classes(labels[place]) for place in present}
        # After the samples are drawn: drawing needs no embeddings, and overlaps with their gather.
        rows_of_part = gathered.wait().index_select(0, order_G).split(counts)
        losses = []
        for place in present:
            part, share = self.parts[place], counts[place] / len(label)
            loss = part.head.loss_of_gathered(rows_of_part[place], sampled[place], global_batch=len(label))
            # The mean over a head's images, weighted by their share: the sum is a mean over all images of the step.
            losses.append(loss * (part.loss_weight * share))
        return torch.stack(losses).sum()

    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        for part in self.parts:
            part.head.step(grad_scale, skip)

    def take_nearest(self) -> tuple[int, int]:
        nearest, images = zip(*(part.head.take_nearest() for part in self.parts), strict=True)
        return sum(nearest), sum(images)

    def load_rows(self, read: Callable[[str, int, int], Tensor]) -> None:
        for part in self.parts:
            # `first` is bound here: a closure would see the last part's.
            def read_part(name: str, start: int, stop: int, first: int = part.first_class) -> Tensor:
                return read(name, first + start, first + stop)

            part.head.load_rows(read_part)

    def state(self) -> dict[str, Tensor]:
        """Return the states of all heads, named `NUMBER.NAME`."""
        return {
            f"{number}.{name}": tensor
            for number, part in enumerate(self.parts)
            for name, tensor in part.head.state().items()
        }


Head = PartialFC | HeadGroup
"""Head of a run."""


def head_parts(head: Head) -> Iterator[HeadPart]:
    """Yield the heads of a group, or a single head as the only part."""
    yield from head.parts if isinstance(head, HeadGroup) else (HeadPart(head),)
