"""Margin head of one dataset, whose class centers are split over the ranks."""

# B local batch   G gathered batch   D embedding   X embedding and norm, or embedding alone

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from facetrain.counter_rng import key_of
from facetrain.distributed import collectives
from facetrain.distributed.world import World
from facetrain.head.base_head import BaseHead
from facetrain.head.build import build_margin
from facetrain.head.center_gradient import AccumulatedGradient
from facetrain.head.class_centers import RowTables, allocate_tables, draw_centers
from facetrain.head.class_chunk import Chunk, FusedChunk, default_chunk_size, fused_chunks_available
from facetrain.head.class_shard import shard_classes
from facetrain.head.expectations import Expectations
from facetrain.head.head_run import HeadRun, HeadStage
from facetrain.head.margins.function_margin import make_margin
from facetrain.head.row_file import Layout
from facetrain.head.row_optimizer import RowOptimizer, moment_layout, one_pass_available
from facetrain.head.sampling import ClassSampler, SampledClasses
from facetrain.head.settings import HeadSettings
from facetrain.head.sharded_softmax import ClassSweep, TakeGradient, sharded_cross_entropy
from facetrain.head.target import NearestCount
from facetrain.optim.settings import OptimSettings

_ROWS_PER_COPY = 1 << 16


class MarginHead(BaseHead):
    """Margin-softmax over identities whose class centers are split over the ranks.

    With `update_in_backward` the centers are updated inside the backward pass, chunk by chunk, and the gradient of
    all of them never exists at once. Otherwise the gradient of the step's rows is accumulated, and `step` applies it.
    Centers that are not trained stay as they are.
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
        # By the rank over all hosts. The local rank would give the same classes to one GPU of each host.
        self.shard = shard_classes(num_classes, world.rank, world.size)
        self.update_in_backward = run.update_in_backward
        self.on_device = settings.placement == "device"
        self._settings, self._optim, self._run = settings, optim, run
        self._rank, self.device = world.rank, world.device
        self.margin = build_margin(settings.margin, seed=run.margin_seed)
        # Stages differ in the sample rate and in the expectations, not in the tables: these are allocated once, for all
        # stages.
        self._stages = run.stages or (HeadStage(0, settings),)
        self._stage = self._stages[0]
        anchor_margin = make_margin("cosface", scale=self.margin.scale, m3=settings.expectation_margin)
        self._expectations = Expectations(self._stages, anchor_margin)
        self._tables = self._allocate_tables()
        self.weight = self._tables.by_name["weight"]
        draw_centers(self.weight.data, self.shard, run.seed)
        self._optimizer = RowOptimizer(
            optim,
            self.device,
            seed=key_of(run.seed, 1),
            one_pass=one_pass_available(optim, self.device, embedding_size),
        )
        self._gradient = AccumulatedGradient()
        self._sampler = self._build_sampler()
        fused = fused_chunks_available(self.device, self.margin, run.product_dtype)
        self.chunk_type: type[Chunk] = FusedChunk if fused else Chunk
        self._nearest = NearestCount()
        self._step = 0
        self._loss_scale: Tensor | None = None

    @property
    def uses_kernels(self) -> bool:
        """Whether Triton kernels compute the logits, or update the centers."""
        return self.chunk_type is FusedChunk or self._optimizer.one_pass

    def avoid_kernels(self) -> None:
        """Compute with PyTorch's operations from now on: the kernels do not work on this machine."""
        # Both, whichever of them has failed: the self-test is one of whole steps.
        self.chunk_type, self._optimizer.one_pass = Chunk, False

    def _allocate_tables(self) -> RowTables:
        """Return the tables of the centers and of the optimizer's moments."""
        settings, run = self._settings, self._run
        columns, dtype = self.embedding_size, getattr(torch, settings.weight_dtype)
        moments: Layout = {}
        if run.trained:
            moments = moment_layout(self._optim, columns, getattr(torch, settings.momentum_dtype))
        return allocate_tables(
            {"weight": (columns, dtype), **moments, **self._expectations.layout(columns, dtype)},
            self.shard.size,
            self.device,
            placement=settings.placement,
            folder=run.folder and run.folder / f"rank_{self._rank:05d}",
            # A stage with all classes reads slices, whatever the other stages do.
            fetched_in_slices=any(stage.settings.sample_rate >= 1 for stage in self._stages),
        )

    def _build_sampler(self) -> ClassSampler:
        return ClassSampler(
            self._tables,
            self.shard,
            self.device,
            self._stage.settings,
            seed=self._run.seed,
            # `step` updates the tables themselves: rows may be copied ahead only if the backward pass updates them.
            prefetch=not self.on_device and self.update_in_backward,
        )

    def begin_step(self, step: int, *, lr: float, loss_scale: Tensor | None = None) -> None:
        stage = next(stage for stage in reversed(self._stages) if stage.first_step <= step)
        if stage is not self._stage:
            self._enter(stage)
        # Before the first forward pass that needs them, from the centers as the last step has left them.
        self._expectations.begin_step(step, self._tables)
        self._step, self._loss_scale = step, loss_scale
        self._optimizer.begin_step(step, self._rank, lr=lr)
        self.margin.begin_step(step)

    def _enter(self, stage: HeadStage) -> None:
        """Change to the settings of another stage."""
        # Rows of the last step that are still on their way: the new sampler reads the tables.
        self._sampler.flush()
        self._stage = stage
        self._sampler = self._build_sampler()

    def _loss_of(self, label_G: Tensor, gathered: collectives.GatheredRows) -> Tensor:
        # Sampling and reading rows need no embeddings, so they overlap with the gather.
        sampled = self.sample_classes(label_G)
        gathered_GX = gathered.wait()
        return self.loss_of_gathered(gathered_GX, sampled, global_batch=len(gathered_GX))

    def sample_classes(self, label_G: Tensor) -> SampledClasses:
        """Return the classes that take part in the step with the labels of all ranks, int64 (G,).

        They are on the host, or anywhere if the head does not read them.
        """
        return self._sampler.sample(label_G, self._step)

    def loss_of_gathered(self, gathered_GX: Tensor, sampled: SampledClasses, *, global_batch: int) -> Tensor:
        """Return the mean loss over a gathered batch, the same scalar on every rank. Collective.

        `gathered_GX` has the unit embeddings of all ranks, followed by their norms if a margin of the run needs them.
        `global_batch` counts the images of all heads, if these images belong to one dataset. The chunks depend on it
        alone, so they are the same in every micro-batch.
        """
        unit_GD, norm_G = gathered_GX, gathered_GX[:, -1] if self.needs_norms else None
        if gathered_GX.shape[1] > self.embedding_size:
            unit_GD = gathered_GX[:, : self.embedding_size]
        sweep = ClassSweep(
            sampled=sampled,
            margin=self.margin,
            classes_per_chunk=self._classes_per_chunk(global_batch),
            chunk_type=self.chunk_type,
            take_gradient=self._take_gradient(sampled),
            count_nearest=self._nearest.add if self.counts_nearest else None,
            product_dtype=self._run.product_dtype,
            loss_scale=self._loss_scale if self.update_in_backward else None,
            one_pass=self._optimizer.one_pass and self.update_in_backward,
        )
        # The second anchor passes over the same classes, with another table and margin: it is made from the sweep.
        anchor = self._expectations.second_anchor(sweep, self._stage)
        return sharded_cross_entropy(unit_GD, norm_G, replace(sweep, second_anchor=anchor))

    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        valid = skip == 0
        # From the tables themselves: with several micro-batches no rows are prefetched, since they would miss this
        # update.
        for rows, gradient in self._gradient.take():
            self._optimizer.update(self._tables.by_name, rows, gradient / grad_scale, valid)

    def take_nearest(self) -> tuple[int, int]:
        return self._nearest.take()

    @property
    def needs_norms(self) -> bool:
        return self.margin.needs_norms

    @property
    def counts_nearest(self) -> bool:
        """Whether `take_nearest` counts samples: only if the nearest class has the largest logit."""
        return not self.margin.changes_negatives

    @property
    def reads_labels(self) -> bool:
        return self._sampler.reads_labels

    @property
    def classes_per_step(self) -> float:
        """Number of classes that are sampled for a step of the present stage; the images' classes take part, too."""
        return self.num_classes * self._stage.settings.sample_rate

    def row_state(self) -> dict[str, Tensor]:
        """Return the tables to save in a checkpoint; row i belongs to class shard.start + i."""
        self._sampler.flush()
        return {name: table.data for name, table in self._tables.by_name.items()}

    def load_rows(self, read: Callable[[str, int, int], Tensor]) -> None:
        for name, table in self.row_state().items():
            # Piece by piece: a whole shard in host memory beside the table would double what a resumed run needs.
            for start in range(self.shard.start, self.shard.stop, _ROWS_PER_COPY):
                stop = min(start + _ROWS_PER_COPY, self.shard.stop)
                table[start - self.shard.start : stop - self.shard.start].copy_(read(name, start, stop))

    def state(self) -> dict[str, Tensor]:
        return self.margin.state() | self._expectations.state()

    def _classes_per_chunk(self, global_batch: int) -> int:
        if self._settings.chunk_size != "auto":
            return self._settings.chunk_size
        # By the global batch and not by the rows that this head has got: accumulated chunks must have the same bounds.
        return default_chunk_size(global_batch, self.embedding_size, self.device.type)

    def _take_gradient(self, sampled: SampledClasses) -> TakeGradient | None:
        """Return the function that takes the gradient of a chunk's centers; None if they are not trained."""
        if not self._run.trained:
            return None
        if self.update_in_backward:
            return partial(self._optimizer.update, sampled.tables.by_name)
        return self._gradient.add
