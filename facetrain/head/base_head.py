"""Interface of a head, of one dataset or of several, and its gather of the batch of all ranks."""

# B local batch   G gathered batch   D embedding   X embedding and norm, or embedding alone

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facetrain.distributed import collectives
from facetrain.errors import DataError, ModelError, UsageError
from facetrain.text import count_text


class BaseHead(nn.Module):
    """Base class of the heads: takes embeddings and labels, and returns the loss."""

    group: collectives.ProcessGroup | None
    """Ranks over which the classes are split; None: all."""
    num_classes: int
    embedding_size: int
    update_in_backward: bool
    """Whether the backward pass updates the centers, and `step` does nothing."""
    on_device: bool
    """Whether the centers are in the memory of the device."""

    _expected: tuple[Tensor, collectives.GatheredRows] | None = None
    """Labels of this rank in the next call, and those of all ranks."""

    @property
    def needs_norms(self) -> bool:
        """Whether a margin contains the norms of the embeddings."""
        raise NotImplementedError

    @property
    def reads_labels(self) -> bool:
        """Whether the head needs the labels of a step on the host."""
        raise NotImplementedError

    def begin_step(self, step: int, *, lr: float, loss_scale: Tensor | None = None) -> None:
        """Start a step: its sample and its random numbers depend on (seed, step), not on the number of ranks.

        It may be called before each micro-batch. With another step, a gradient that `step` has not taken is dropped.

        `lr` is the learning rate of the centers. `loss_scale` is the factor on the loss in the backward passes, a
        scalar on the device (None: 1), such as that of `torch.amp.GradScaler`: an update in the backward pass divides
        the centers' gradient by it; otherwise `step` does.
        """
        raise NotImplementedError

    def expect_labels(self, label_B: Tensor) -> None:
        """Start to gather the labels of the next call, given on the host as it takes them. Collective.

        A head that samples classes on a GPU needs them there; called before the backbone's forward pass, this saves it
        from waiting for the device. Every rank must call it, or none.

        Raises:
            UsageError: the ranks cannot exchange tensors on the host.
        """
        if self.reads_labels:
            if not collectives.reaches_hosts(self.group):
                raise UsageError(
                    "expect_labels: the process group has no backend for tensors on the host; form it with "
                    'init_process_group("cpu:gloo,cuda:nccl")'
                )
            label_B = label_B.flatten().long()
            self._expected = label_B, collectives.GatheredRows(label_B, self.group)

    def forward(self, embedding_BD: Tensor, label_B: Tensor) -> Tensor:
        """Return the loss of the global batch; a scalar, the same on every rank.

        `label_B` are integers, (B,) or (B, 1), and count the classes of all datasets. Collective: every rank must pass
        the same number of rows.

        Raises:
            DataError: the batch is empty, there is not one integer label for each embedding, or a label is outside
                [0, num_classes). The values of CUDA labels are not checked here, because the host would have to wait
                for the device; the caller checks them by `check_labels` before it copies them.
            ModelError: the embeddings do not have the size of the centers.
            UsageError: the labels are others than those that `expect_labels` has got; of CUDA labels the number alone
                is checked.
        """
        # Taken before anything can fail: labels that were expected for a call must not serve the next.
        expected, self._expected = self._expected, None
        if embedding_BD.shape[1:] != (self.embedding_size,):
            raise ModelError(
                f"the head takes embeddings of shape (B, {self.embedding_size}), and got {tuple(embedding_BD.shape)}; "
                "make the last layer of the network as long as the centers (model.embedding_size)"
            )
        if label_B.numel() != len(embedding_BD):
            raise DataError(
                f"labels of shape {tuple(label_B.shape)} for {count_text(len(embedding_BD), 'embedding')}; give the "
                "number of the class of each"
            )
        if label_B.is_floating_point():
            raise DataError(f"labels of {label_B.dtype}; give integers: floating point rounds large labels")
        label_B = label_B.flatten().long()
        if not len(label_B):
            raise DataError("the batch has no images")
        if label_B.device.type == "cpu":
            self.check_labels(label_B.numpy())
        if expected is None:
            label_G = collectives.gather(label_B, self.group).flatten()
        else:
            own_B, gathered_labels = expected
            on_host = own_B.device.type == label_B.device.type == "cpu"
            if len(own_B) != len(label_B) or (on_host and not torch.equal(own_B, label_B)):
                raise UsageError(
                    "the labels are not those that expect_labels has got; call it with the labels of each batch, or "
                    "never"
                )
            label_G = gathered_labels.wait()
        if self.reads_labels:
            # The host selects the sampled classes: the sizes of all tensors are then known without asking the device.
            label_G = label_G.cpu()  # waits for the device, unless the labels were expected
        # The embeddings are on their way while the head samples classes and reads their rows: it waits for them when it
        # needs them.
        return self._loss_of(label_G, _start_gather(embedding_BD, self.group, with_norms=self.needs_norms))

    def _loss_of(self, label_G: Tensor, gathered: collectives.GatheredRows) -> Tensor:
        """Return the loss of a batch whose unit embeddings (G, X) are being gathered, each followed by its norm."""
        raise NotImplementedError

    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        """Update the centers by the accumulated gradient / `grad_scale`, unless they were updated in backward.

        If the scalar `skip` is 1, or loss or slopes of a micro-batch are not finite, no center changes and the gradient
        is discarded. Both tensors are on the device.
        """
        raise NotImplementedError

    def take_nearest(self) -> tuple[int, int]:
        """Return how many samples had the nearest target class, and of how many, since the last call.

        A target class is the nearest if no other class of the step has a larger cosine, without the margin. Classes
        that `filter_threshold` excludes do not count, or with a scale above 64 as classes of cosine 0. Collective;
        waits for the device.
        """
        raise NotImplementedError

    def check_labels(self, labels: np.ndarray | Sequence[int]) -> None:
        """Check that every label, of an array or a list of integers, is a class of the head.

        Raises:
            DataError: one is not.
        """
        labels = np.asarray(labels)
        wrong = labels[(labels < 0) | (labels >= self.num_classes)]
        if len(wrong):
            raise DataError(
                f"label {int(wrong[0])} is outside the {self.num_classes:,} classes of the head (0 to "
                f"{self.num_classes - 1:,}), one of {count_text(len(wrong), 'invalid label')}; check data.num_classes "
                "and the dataset"
            )

    def load_rows(self, read: Callable[[str, int, int], Tensor]) -> None:
        """Load saved tables, after `load_state`, which says which of them have a content.

        `read(name, start, stop)` returns the rows of the classes with labels [start, stop).
        """
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Return what to save in a checkpoint beside the tables, the same on every rank.

        These are the running averages of the margin, and whether the expectations have begun.
        """
        raise NotImplementedError

    def load_state(self, saved: dict[str, Tensor]) -> None:
        """Load what `state` returned; entries missing in `saved` keep their values.

        Raises:
            ValueError: an entry has another shape.
        """
        for name, tensor in self.state().items():
            if name in saved:
                if saved[name].shape != tensor.shape:
                    shapes = f"{list(saved[name].shape)}, and here {list(tensor.shape)}"
                    raise ValueError(f"{name} has the shape {shapes}")
                # Into the tensor that the margin or the loss reads, on its device.
                tensor.copy_(saved[name])


def _start_gather(
    embedding_BD: Tensor, group: collectives.ProcessGroup | None, *, with_norms: bool
) -> collectives.GatheredRows:
    """Start to gather unit embeddings, each followed by its norm if requested: (G, X). Collective."""
    # The squares of 16-bit numbers overflow fp16 from 256 on.
    embedding_BD = embedding_BD.to(torch.promote_types(embedding_BD.dtype, torch.float32))
    # Before the gather: each rank normalizes its rows once, and what the backward pass sums over the ranks is the
    # gradient of the unit embeddings.
    unit_BD = F.normalize(embedding_BD)
    if not with_norms:
        return collectives.GatheredRows(unit_BD, group)
    # One message for both: a second gather would wait for the network once more.
    norm_B = torch.linalg.vector_norm(embedding_BD, dim=1)
    return collectives.GatheredRows(torch.cat([unit_BD, norm_B[:, None]], dim=1), group)
