"""Margin head: takes embeddings and labels, returns the loss, and updates its class centers itself."""

# B local batch   G gathered batch   D embedding   X embedding and norm, or embedding alone

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from facetrain.counter_rng import key_of
from facetrain.distributed import collectives
from facetrain.distributed.world import World
from facetrain.head.center_gradient import AccumulatedGradient, UnfinishedGradient
from facetrain.head.class_centers import Rows, RowTables, allocate_tables, draw_centers
from facetrain.head.class_chunk import Chunk, FusedChunk, default_chunk_size, fused_chunks_available
from facetrain.head.class_shard import shard_classes
from facetrain.head.expectations import Expectations
from facetrain.head.gathered_batch import LabelGather, check_labels, start_gather
from facetrain.head.head_run import HeadRun, HeadStage
from facetrain.head.losses import LearnedThreshold, Loss, Softmax
from facetrain.head.margins.base import build_margin
from facetrain.head.margins.combined import CombinedMargin
from facetrain.head.row_file import Layout
from facetrain.head.row_optimizer import RowOptimizer, moment_layout, one_pass_available
from facetrain.head.sampling import ClassSampler, SampledClasses
from facetrain.head.settings import HeadSettings, MarginSettings
from facetrain.head.sharded_softmax import ClassSweep, TakeGradient, sharded_cross_entropy
from facetrain.head.sub_centers import SubCenters
from facetrain.head.target import NearestCount, TargetClass
from facetrain.head.teacher_centers import follow_teacher
from facetrain.optim.settings import OptimSettings

_ROWS_PER_COPY = 1 << 16


class MarginHead:
    """Margin-softmax over identities whose class centers are split over the ranks.

    With `update_in_backward` the centers are updated inside the backward pass, chunk by chunk, and the gradient of
    all of them never exists at once. Otherwise the gradient of the step's rows is accumulated, and `step` applies it.
    Centers that are not trained stay as they are, or follow a teacher.
    """

    def __init__(
        self,
        settings: HeadSettings,
        optim: OptimSettings,
        run: HeadRun,
        world: World,
        *,
        embedding_size: int,
        num_classes: int,
    ) -> None:
        """Draw this rank's centers. The optimizer of the centers has the settings of the backbone's."""
        self.num_classes, self.embedding_size = num_classes, embedding_size
        self.shard = shard_classes(num_classes, world.rank, world.size)
        self.update_in_backward = run.update_in_backward
        self.on_device = settings.placement == "device"
        self._settings, self._optim, self._run = settings, optim, run
        self._rank, self._device = world.rank, world.device
        self.margin = build_margin(settings.margin, seed=run.margin_seed)
        self._stages = run.stages or (HeadStage(0, settings),)
        self._stage = self._stages[0]
        anchor_margin = CombinedMargin(
            MarginSettings(scale=self.margin.scale), m3=settings.expectation_margin
        )
        self._expectations = Expectations(self._stages, anchor_margin)
        self._tables = self._allocate_tables()
        self.weight = self._tables.by_name["weight"]
        draw_centers(self.weight.data, self.shard, run.seed)
        self._step_tables = self._tables
        """Tables with the rows of the current step: `_tables`, or prefetched copies of some rows."""
        self._optimizer = self._build_optimizer()
        self._gradient = AccumulatedGradient()
        self._sampler = self._build_sampler()
        self._sub_centers = SubCenters(
            self.shard.size, settings, self._device, drop_from_step=run.drop_from_step
        )
        self._threshold = self._build_threshold() if settings.loss == "unified" else None
        self._loss: Loss = self._threshold.loss if self._threshold else Softmax()
        fused = fused_chunks_available(
            self._device, self.margin, self._loss, settings.sub_centers, run.product_dtype
        )
        self.chunk_type = FusedChunk if fused else Chunk
        self._labels = LabelGather()
        self._nearest = NearestCount()
        self._step, self._lr = 0, 0.0
        self._loss_scale: Tensor | None = None

    def _allocate_tables(self) -> RowTables:
        """Return the tables of the centers and of the optimizer's moments."""
        settings, run = self._settings, self._run
        columns, dtype = settings.sub_centers * self.embedding_size, getattr(torch, settings.weight_dtype)
        moments: Layout = {}
        if run.trained:
            moments = moment_layout(self._optim, columns, getattr(torch, settings.momentum_dtype))
        return allocate_tables(
            {"weight": (columns, dtype), **moments, **self._expectations.layout(columns, dtype)},
            self.shard.size,
            self._device,
            placement=settings.placement,
            folder=run.folder and run.folder / f"rank_{self._rank:05d}",
            fetched_in_slices=any(stage.settings.sample_rate >= 1 for stage in self._stages),
        )

    def _build_optimizer(self) -> RowOptimizer:
        settings = self._settings
        return RowOptimizer(
            self._optim,
            self._device,
            seed=key_of(self._run.seed, 1),
            one_pass=one_pass_available(self._optim, settings, self._device, self.embedding_size),
            sub_centers=settings.sub_centers,
        )

    def _build_sampler(self) -> ClassSampler:
        return ClassSampler(
            self._tables,
            self.shard,
            self._device,
            self._stage.settings,
            seed=self._run.seed,
            # `step` updates the tables themselves: rows may be copied ahead only if the backward pass updates them.
            prefetch=not self.on_device and self.update_in_backward,
        )

    def _build_threshold(self) -> LearnedThreshold:
        negatives = self.num_classes * self._stage.settings.sample_rate
        return LearnedThreshold(self._optim, self._settings, self._device, negatives=negatives)

    def begin_step(self, step: int, *, lr: float, loss_scale: Tensor | None = None) -> None:
        """Start a step: its sample and its random numbers depend on (seed, step), not on the number of ranks.

        `lr` is the learning rate of the centers. `loss_scale` is the factor on the loss in the backward passes, a
        scalar on the device (None: 1): an update in the backward pass divides the centers' gradient by it; otherwise
        `step` does.
        """
        stage = next(stage for stage in reversed(self._stages) if stage.first_step <= step)
        if stage is not self._stage:
            self._enter(stage)
        self._expectations.begin_step(step, self._tables)
        self._step, self._lr, self._loss_scale = step, lr, loss_scale
        self._optimizer.begin_step(step, self._rank)
        self.margin.begin_step(step)
        self._sub_centers.begin_step(step)

    def _enter(self, stage: HeadStage) -> None:
        """Change to the settings of another stage."""
        # Rows of the last step that are still on their way: the new sampler reads the tables.
        self._sampler.flush()
        self._tables.wait()
        self._stage, self._step_tables = stage, self._tables
        self._sampler = self._build_sampler()

    def __call__(
        self, embedding_BD: Tensor, label_B: Tensor, teacher: collectives.GatheredRows | None = None
    ) -> Tensor:
        """Return the mean loss over the global batch; a scalar, the same on every rank.

        `label_B` is int64 and counts the classes of the whole head. Centers that follow a `teacher` (of
        `start_teacher_gather`) move first. Collective: every rank must pass the same number of rows.

        Raises:
            DataError: a label is outside [0, num_classes). CUDA labels are not checked here, because the host would
                have to wait for the device; the caller checks them by `check_labels` before it copies them.
        """
        if label_B.device.type == "cpu":
            self.check_labels(label_B.numpy())
        label_G = self._labels.gather(label_B)
        if self.reads_labels:
            # The host selects the sampled classes: the sizes of all tensors are then known without asking the device.
            label_G = label_G.cpu()  # waits for the device, unless the labels were expected
        gathered = start_gather(embedding_BD, with_norms=self.margin.needs_norms)
        # Sampling and reading rows need no embeddings, so they overlap with the gather.
        sampled = self.sample_classes(label_G)
        if teacher is not None:
            self.follow_teacher(label_G, teacher.wait())
        gathered_GX = gathered.wait()
        unit_GD, norm_G = (
            (gathered_GX[:, :-1], gathered_GX[:, -1]) if self.margin.needs_norms else (gathered_GX, None)
        )
        return self.loss_of_gathered(unit_GD, norm_G, sampled, global_batch=len(unit_GD))

    def sample_classes(self, label_G: Tensor) -> SampledClasses:
        """Return the classes that take part in the step with the labels of all ranks, int64 (G,).

        The labels are on the host if `reads_labels`, else on the device.
        """
        return self._sampler.sample(label_G, self._step)

    def follow_teacher(self, label_G: Tensor, teacher_GX: Tensor) -> None:
        """Move the centers as `teacher_centers.follow_teacher`; the labels are where `sample_classes` needs them."""
        follow_teacher(self._tables.by_name["weight"], self.shard, label_G, teacher_GX)

    def loss_of_gathered(
        self, unit_GD: Tensor, norm_G: Tensor | None, sampled: SampledClasses, *, global_batch: int
    ) -> Tensor:
        """Return the mean loss over a gathered batch, the same scalar on every rank. Collective.

        `unit_GD` has the unit embeddings of all ranks, `norm_G` their norms if the margin needs them. `global_batch`
        counts the images of all heads, if these images belong to one dataset. The chunks depend on it alone, so they
        are the same in every micro-batch.
        """
        self._step_tables = sampled.tables
        sweep = ClassSweep(
            sampled=sampled,
            margin=self.margin,
            loss=self._loss,
            classes_per_chunk=self._classes_per_chunk(global_batch),
            chunk_type=self.chunk_type,
            take_gradient=self._take_gradient(),
            update_in_backward=self.update_in_backward,
            count_nearest=self._nearest.add if self.counts_nearest else None,
            finish=partial(self._finish_backward, sampled.class_S),
            product_dtype=self._run.product_dtype,
            # Indexed as the rows of the step's tables: prefetched ones have the sampled classes only.
            dominant_K=self._sub_centers.dominant_of(sampled.class_S if sampled.index_S is None else None),
            least_cos=self._sub_centers.least_cos,
            loss_scale=self._loss_scale if self.update_in_backward else None,
            one_pass=self._optimizer.one_pass and self.update_in_backward,
        )
        # The second anchor passes over the same classes, with another table and margin: it is made from the sweep.
        anchor = self._expectations.second_anchor(sweep, self._stage)
        return sharded_cross_entropy(unit_GD, norm_G, replace(sweep, second_anchor=anchor))

    def expect_labels(self, label_B: Tensor) -> None:
        """Start to gather the labels of the next call, given on the host (int64). Collective.

        A head that samples classes on a GPU needs them there; called before the backbone's forward pass, this saves it
        from waiting for the device. Every rank must call it, or none.
        """
        if self.reads_labels:
            self._labels.expect(label_B)

    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        """Update the centers by the accumulated gradient / `grad_scale`, unless they were updated in backward.

        If the scalar `skip` is 1, nothing changes and the gradient is discarded. Both tensors are on the device.
        """
        valid = skip == 0
        chunks = self._gradient.take()
        for number, (rows, gradient) in enumerate(chunks):
            # Rows in host memory are copied while the chunk before is updated.
            for ahead, _ in chunks[number : number + 2]:
                self._tables.begin_fetch(ahead)
            self._optimizer.update(self._tables.by_name, rows, gradient / grad_scale, self._lr, valid)
        if self._threshold:
            self._threshold.step(self._lr, valid, grad_scale)

    def take_nearest(self) -> tuple[int, int]:
        """Return how many samples had the nearest target class, and of how many, since the last call.

        A target class is the nearest if no other class of the step has a larger cosine, without the margin; classes
        that `filter_threshold` excludes do not count. Collective; waits for the device.
        """
        return self._nearest.take()

    @property
    def counts_nearest(self) -> bool:
        """Whether `take_nearest` counts samples: only if the nearest class has the largest logit."""
        return isinstance(self._loss, Softmax) and not self.margin.changes_negatives

    @property
    def reads_labels(self) -> bool:
        """Whether the head needs the labels of a step on the host."""
        return self._sampler.reads_labels

    @property
    def classes_per_step(self) -> float:
        """Number of classes that are sampled for a step of the present stage; the images' classes take part, too."""
        return self.num_classes * self._stage.settings.sample_rate

    def check_labels(self, labels: np.ndarray) -> None:
        """Check that every label is a class of the head.

        Raises:
            DataError: one is not.
        """
        check_labels(labels, self.num_classes)

    def row_state(self) -> dict[str, Tensor]:
        """Return the tables to save in a checkpoint; row i belongs to class shard.start + i."""
        self._sampler.flush()
        self._tables.wait()
        tables = {name: table.data for name, table in self._tables.by_name.items()}
        return tables | self._sub_centers.row_state()

    def load_rows(self, read: Callable[[str, int, int], Tensor]) -> None:
        """Load saved tables; `read(name, start, stop)` returns the rows of classes [start, stop)."""
        for name, table in self.row_state().items():
            for start in range(self.shard.start, self.shard.stop, _ROWS_PER_COPY):
                stop = min(start + _ROWS_PER_COPY, self.shard.stop)
                table[start - self.shard.start : stop - self.shard.start].copy_(read(name, start, stop))
        # Every rank asks for the same class, so that all of them decide alike.
        self._expectations.find_whether_begun(read)

    def state(self) -> dict[str, Tensor]:
        """Return the rest to save in a checkpoint, the same on every rank.

        These are averages, threshold, and whether the expectations have begun.
        """
        threshold = self._threshold.state() if self._threshold else {}
        return self.margin.state() | threshold | self._expectations.state()

    def load_state(self, saved: dict[str, Tensor]) -> None:
        """Load what `state` returned; entries missing in `saved` keep their values."""
        for name, tensor in self.state().items():
            if name in saved:
                tensor.copy_(saved[name])

    def _classes_per_chunk(self, global_batch: int) -> int:
        if self._settings.chunk_size != "auto":
            return self._settings.chunk_size
        sub_centers = self._settings.sub_centers
        return default_chunk_size(
            global_batch * sub_centers, self.embedding_size * sub_centers, self._device.type
        )

    def _take_gradient(self) -> TakeGradient | None:
        """Return the function that takes the gradient of a chunk's centers; None if they are not trained."""
        if not self._run.trained:
            return None
        return self._update_chunk if self.update_in_backward else self._gradient.add

    def _update_chunk(self, rows: Rows, gradient: Tensor | UnfinishedGradient, finite: Tensor) -> None:
        self._optimizer.update(self._step_tables.by_name, rows, gradient, self._lr, finite)

    def _finish_backward(self, class_S: Tensor | None, target: TargetClass, finite: Tensor) -> None:
        self._sub_centers.count(target, class_S, finite)
        if self._threshold and self.update_in_backward:
            self._threshold.step(self._lr, finite)
