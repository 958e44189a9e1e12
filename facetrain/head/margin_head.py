"""The head: one call takes embeddings and labels and gives the loss; the centers update themselves."""

# B local batch   G gathered batch   D embedding   K this rank's classes   S sampled of K

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.counter_rng import key_of
from facetrain.distributed import collectives
from facetrain.errors import DataError
from facetrain.head.class_centers import Rows, place_tables
from facetrain.head.class_chunk import Chunk, FusedChunk, fused_chunks_serve
from facetrain.head.class_shard import shard_classes
from facetrain.head.losses import LearnedThreshold, Loss, Softmax
from facetrain.head.margins import Margin
from facetrain.head.row_optimizer import (
    AccumulatedGradient,
    RowOptimizer,
    RowOptimizerSettings,
    moment_layout,
)
from facetrain.head.sampling import ClassSampler
from facetrain.head.sharded_softmax import ClassSweep, sharded_cross_entropy
from facetrain.head.sub_centers import SubCenters
from facetrain.head.target import TargetClass

_INIT_BLOCK = 4096
_INIT_STD = 0.01


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """Settings of a head.

    The section `head` of the config's schema states their meaning and their defaults; what a run derives from
    other sections is explained here.
    """

    loss: str
    negative_weight: float
    sub_centers: int
    drop_from_step: int | None
    """First step with dominant sub-centers only; None: never."""
    drop_angle: float
    sample_rate: float
    sample_block: int
    weight_dtype: torch.dtype
    momentum_dtype: torch.dtype
    placement: str
    folder: Path | None
    """Folder of the row file, with placement disk."""
    chunk_size: int | None
    """None: chosen by the batch and the device."""
    product_dtype: torch.dtype | None
    """Dtype to which the factors of the large matrix products are rounded; None: they keep theirs."""
    update_in_backward: bool
    """Update the centers chunk by chunk in the backward pass. Needs one micro-batch per step and no loss scale."""


class MarginHead:
    """Margin-softmax over identities whose class centers are split over the ranks.

    With `update_in_backward` the centers are updated inside the backward pass, chunk by chunk, and the gradient of
    all of them never exists at once. Otherwise the gradient of the step's rows is accumulated, and `step` applies it.
    """

    def __init__(
        self,
        settings: HeadSettings,
        optimizer: RowOptimizerSettings,
        margin: Margin,
        *,
        embedding_size: int,
        num_classes: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.num_classes, self.embedding_size = num_classes, embedding_size
        self.shard = shard_classes(num_classes, rank, world_size)
        self.lr, self.update_in_backward = 0.0, settings.update_in_backward
        self.on_device = settings.placement == "device"
        self._rank, self._margin, self._seed = rank, margin, seed
        self._chunk_size, self._product_dtype = settings.chunk_size, settings.product_dtype
        self._device = device or torch.device("cpu")
        width = settings.sub_centers * embedding_size
        self._tables = place_tables(
            {
                "weight": (width, settings.weight_dtype),
                **moment_layout(optimizer, width, settings.momentum_dtype),
            },
            self.shard.size,
            self._device,
            placement=settings.placement,
            folder=settings.folder / f"rank_{rank:05d}" if settings.folder else None,
            in_stretches=settings.sample_rate >= 1,
        )
        self._near = self._tables
        """Where the step's rows are: these, or a copy of some on the device."""
        self.weight = self._tables.by_name["weight"]
        self._optimizer = RowOptimizer(optimizer, self._device, seed=key_of(seed, 1))
        self._chooser = ClassSampler(
            self._tables,
            self.shard,
            self._device,
            sample_rate=settings.sample_rate,
            sample_block=settings.sample_block,
            seed=seed,
            staged=not self.on_device and settings.update_in_backward,
        )
        self._sub_centers = SubCenters(
            self.shard.size,
            settings.sub_centers,
            self._device,
            drop_from_step=settings.drop_from_step,
            drop_angle=settings.drop_angle,
        )
        self._threshold: LearnedThreshold | None = None
        if settings.loss == "unified":
            # As many negatives as a sample meets decide where the threshold starts.
            start = math.log(max(num_classes * settings.sample_rate, 1) * 10)
            self._threshold = LearnedThreshold(
                start, settings.negative_weight, settings.weight_dtype, self._device, optimizer
            )
        self._objective: Loss = self._threshold.objective if self._threshold else Softmax()
        serves = fused_chunks_serve(
            self._device, margin, self._objective, settings.sub_centers, settings.product_dtype
        )
        self.chunk_type = FusedChunk if serves else Chunk
        self._step = 0
        self._gradient = AccumulatedGradient()
        self._initialize()

    def begin_step(self, step: int) -> None:
        """Choose the sample of a step: it depends on (seed, step, class), not on the number of ranks."""
        self._step = step
        self._optimizer.begin_step(step, self._rank)
        self._margin.begin_step(step)
        self._sub_centers.begin_step(step)

    def __call__(self, embedding_BD: Tensor, label_B: Tensor) -> Tensor:
        """Return the mean loss over the global batch; a scalar, the same on every rank.

        Collective: every rank brings as many rows. `label_B` is int64, classes of the whole head.

        Raises:
            DataError: a label lies outside [0, num_classes). On CUDA that is left to `check_labels`,
                which does not wait for the device at every step.
        """
        if label_B.device.type == "cpu":
            self.check_labels(label_B.numpy())
        label_G = collectives.gather(label_B).flatten()
        coming = self._send(embedding_BD)
        # Needs no embeddings: the sample is drawn, and its rows are fetched, while those travel.
        chosen = self._chooser.choose(label_G, self._step)
        self._near = chosen.tables
        unit_GD, norm_G = self._parted(coming.wait())
        width = self.weight.data.shape[1]
        sweep = ClassSweep(
            weight=chosen.tables.by_name["weight"],
            index_S=chosen.index_S,
            place_G=chosen.place_G,
            margin=self._margin,
            objective=self._objective,
            chunk_size=self._chunk_size
            or _chunk_for(len(unit_GD) * (width // self.embedding_size), width, self._device),
            chunk_type=self.chunk_type,
            take_gradient=self._update_now if self.update_in_backward else self._gradient.add,
            finish=partial(self._finish, chosen.class_S),
            product_dtype=self._product_dtype,
            dominant=self._sub_centers.dominant_of(chosen.class_S if chosen.index_S is None else None),
            least_cos=self._sub_centers.least_cos,
        )
        return sharded_cross_entropy(unit_GD, norm_G, sweep)

    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        """Update the centers by the gradient collected since the last step, `grad_scale` times too large.

        Where the scalar `skip` is 1, nothing changes, and the gradient is forgotten. Both are on the device.
        """
        valid = skip == 0
        for rows, gradient in self._gradient.take():
            self._optimizer.update(self._tables.by_name, rows, gradient / grad_scale, self.lr, valid)
        if self._threshold:
            self._threshold.step(self.lr, valid, grad_scale)

    def check_labels(self, labels: np.ndarray) -> None:
        """Make sure that every label is a class.

        Raises:
            DataError: one is not; it would have no center, and its loss no gradient.
        """
        wrong = labels[(labels < 0) | (labels >= self.num_classes)]
        if len(wrong):
            raise DataError(
                f"label {int(wrong[0])} is outside the {self.num_classes:,} classes of the head (0 to "
                f"{self.num_classes - 1:,}); {len(wrong):,} labels are: check data.num_classes and the dataset"
            )

    def row_state(self) -> dict[str, Tensor]:
        """Return what a checkpoint must hold: tables whose row i belongs to class shard.start + i."""
        self._chooser.settle()
        tables = {name: table.data for name, table in self._tables.by_name.items()}
        return tables | self._sub_centers.row_state()

    def load_rows(self, read: Callable[[str, int, int], Tensor]) -> None:
        """Take over saved tables; `read(name, start, stop)` returns the rows of classes [start, stop)."""
        for name, table in self.row_state().items():
            for start in range(self.shard.start, self.shard.stop, 1 << 16):
                stop = min(start + (1 << 16), self.shard.stop)
                table[start - self.shard.start : stop - self.shard.start].copy_(read(name, start, stop))

    def state(self) -> dict[str, Tensor]:
        """Return what else a checkpoint must hold: averages and thresholds, the same on every rank."""
        return self._margin.state() | (self._threshold.state() if self._threshold else {})

    def load_state(self, saved: dict[str, Tensor]) -> None:
        """Take over what `state` returned; what is not in `saved` stays as it is."""
        for name, tensor in self.state().items():
            if name in saved:
                tensor.copy_(saved[name])

    def _send(self, embedding_BD: Tensor) -> collectives.GatheredRows:
        """Send unit embeddings to all ranks, followed by their lengths where the margin sees them."""
        embedding_BD = embedding_BD.to(torch.promote_types(embedding_BD.dtype, torch.float32))
        unit_BD = F.normalize(embedding_BD)
        if not self._margin.needs_norms:
            return collectives.GatheredRows(unit_BD)
        norm_B = torch.linalg.vector_norm(embedding_BD, dim=1)
        return collectives.GatheredRows(torch.cat([unit_BD, norm_B[:, None]], dim=1))

    def _parted(self, sent_GX: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings and the lengths of what was sent."""
        return (sent_GX[:, :-1], sent_GX[:, -1]) if self._margin.needs_norms else (sent_GX, None)

    def _update_now(self, rows: Rows, gradient: Tensor, finite: Tensor) -> None:
        self._optimizer.update(self._near.by_name, rows, gradient, self.lr, finite)

    def _finish(self, class_S: Tensor | None, own: TargetClass, finite: Tensor) -> None:
        self._sub_centers.count(own, class_S, finite)
        if self._threshold and self.update_in_backward:
            self._threshold.step(self.lr, finite)

    def _initialize(self) -> None:
        """Draw centers from N(0, 0.01²): by blocks of classes, so that they do not depend on the shards."""
        blocks = range(self.shard.start // _INIT_BLOCK, -(-self.shard.stop // _INIT_BLOCK))
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for _ in pool.map(self._draw_block, blocks):
                pass

    def _draw_block(self, block: int) -> None:
        generator = torch.Generator().manual_seed(key_of(self._seed, 2, block) & (2**63 - 1))
        first, table = block * _INIT_BLOCK, self.weight.data
        start, stop = max(first, self.shard.start), min(first + _INIT_BLOCK, self.shard.stop)
        rows = table[start - self.shard.start : stop - self.shard.start]
        whole = len(rows) == _INIT_BLOCK and rows.is_contiguous()
        if whole and rows.dtype == torch.float32 and rows.device.type == "cpu":
            rows.normal_(0, _INIT_STD, generator=generator)
        else:
            drawn = torch.empty(_INIT_BLOCK, table.shape[1]).normal_(0, _INIT_STD, generator=generator)
            rows.copy_(drawn[start - first : stop - first])


def _chunk_for(global_batch: int, embedding_size: int, device: torch.device) -> int:
    if device.type == "cuda":  # enough logits to fill it
        return max((1 << 26) // global_batch, 128)
    # Logits, centers, momentum and gradient of a chunk stay in the processor's last cache.
    return max((1 << 22) // (2 * global_batch + 3 * embedding_size), 128)
