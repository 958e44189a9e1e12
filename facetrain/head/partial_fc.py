"""Partial FC: margin-softmax over identities whose class centers are split over the ranks, as a module of PyTorch."""

# B local batch   G gathered batch   D embedding   X embedding and norm, or embedding alone   K this rank's classes

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from facetrain.counter_rng import key_of
from facetrain.device.capability import multiplies_bfloat16
from facetrain.device.thread_device import numbered
from facetrain.distributed import collectives
from facetrain.errors import UsageError
from facetrain.head import shard_state
from facetrain.head.base_head import BaseHead
from facetrain.head.center_gradient import AccumulatedGradient, ParameterGradient, UnfinishedGradient
from facetrain.head.class_centers import (
    MARGIN_DRAWS,
    NOISE,
    ParameterTable,
    Rows,
    RowTables,
    Storage,
    allocate_tables,
    draw_centers,
)
from facetrain.head.class_chunk import (
    Chunk,
    FusedChunk,
    default_chunk_size,
    fused_chunks_available,
    plain_chunk_type,
)
from facetrain.head.class_shard import row_pieces, shard_classes
from facetrain.head.expectations import Expectations
from facetrain.head.margins.base import Margin
from facetrain.head.margins.function_margin import FunctionMargin, MarginLike, make_margin
from facetrain.head.row_file import Layout
from facetrain.head.row_optimizer import CenterUpdate, RowOptimizer, moment_layout, one_pass_available
from facetrain.head.sampling import ClassSampler, SampledClasses, Stage
from facetrain.head.sharded_softmax import ClassSweep, TakeGradient, sharded_cross_entropy, without_autocast
from facetrain.head.target import NearestCount
from facetrain.text import count_text

_call_uncompiled: Callable[..., Tensor] | None = None
_SMALL_BYTES, _KEPT_SHARE = 1 << 28, 4
"""Exponentials are kept for the backward pass if they have fewer bytes than this, or than one in so many of centers and
momentum in float32."""


class PartialFC(BaseHead):
    """Margin-softmax over identities whose class centers are split over the ranks (An et al., arXiv 2203.15565).

        head = PartialFC("arcface", embedding_size=512, num_classes=360_232, sample_rate=0.1)
        optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
        loss = head(backbone(image), label)
        loss.backward()

    `weight` holds this rank's centers, (K, D). All logits never exist at once: they are computed chunk by chunk, in the
    forward and again in the backward pass. The loss is the mean over the batches of all ranks and the same on each; the
    gradient of the embeddings is multiplied by the number of ranks, by which DDP divides. Each call draws another
    sample of the classes, and only the centers of the sample get a gradient. All ranks must call with as many
    embeddings. Under `torch.autocast`, the factors of the large products are rounded to bfloat16.

    With `update` the head is its own optimizer, as in `facetrain train`: `begin_step` starts each step, which has one
    call; its backward pass updates the centers chunk by chunk, and the gradient of all of them never exists.
    """

    def __init__(
        self,
        margin: MarginLike,
        embedding_size: int,
        num_classes: int,
        sample_rate: float = 1.0,
        fp16: bool = False,
        *,
        process_group: collectives.ProcessGroup | None = None,
        scale: float = 64.0,
        filter_threshold: float = 0.0,
        seed: int = 0,
        device: torch.device | str = "cpu",
        chunk_size: int | None = None,
        recompute: bool | None = None,
        sparse: bool = False,
        trained: bool = True,
        update: CenterUpdate | None = None,
        storage: Storage | None = None,
        stages: Sequence[Stage] = (),
        expectation_margin: float = 0.4,
        place: tuple[int, int] | None = None,
    ) -> None:
        """Draw this rank's centers. The order of the first five arguments is that of arcface_torch's `PartialFC_V2`.

        Args:
            margin: name of a margin; a function of the target cosines (G,), or of these and the embeddings' norms
                (G,), of operations that autograd differentiates; a subclass of `Margin`, or an object of one; or a loss
                of arcface_torch, a module of (logits, labels).
            embedding_size: D.
            num_classes: classes of all ranks.
            sample_rate: fraction of the classes that take part in a call; the classes of the batch always do.
            fp16: round the factors of the large products to 16 bits (bfloat16); on a GPU of compute capability below
                8.0, which is slower with them, this has no effect.
            process_group: ranks over which the centers are split; None: all ranks, or one process without a group.
            scale: factor on the cosines; a margin that is an object has its own.
            filter_threshold: cosine above which a negative counts as label noise; its logit is set to 0. 0: no filter.
            seed: key of the first centers, the samples, the random margins and the stochastic rounding.
            device: device of the centers; without `update`, `head.to(…)` moves them.
            chunk_size: classes whose logits exist at the same time; None: by the size of the batch.
            recompute: compute the logits again in the backward pass. False: keep their exponentials, (G, S) for the S
                classes of the sample; a step then has three large products and not four. None: keep them if they need
                at most a quarter of the memory of centers and momentum on the device, or 256 MiB.
            sparse: give the gradient of a sample as a sparse tensor, for `torch.optim.SparseAdam` or plain SGD.
            trained: whether the centers are trained; with `update`, `requires_grad_(False)` does not freeze them.
            update: update of the centers by the head itself, if they are trained; None: `weight` gets a gradient.
            storage: dtype of the centers, and with `update` the memory that holds them; None: float32 on the device.
            stages: steps that differ in the sample rate and in the expectations; (): one stage.
            expectation_margin: margin on the cosine to the expectation of the target class, see `Stage`.
            place: rank, and number of ranks, in the split of the classes; None: as in the process group.

        Raises:
            UsageError: there is no such margin, optimizer, placement or kind of expectations, a number is out of its
                range, the storage or a stage needs `update`, or this rank is not in the process group.
            RunError: the disk has no space for the centers.
        """
        super().__init__()
        for name, value, fits, allowed in (
            ("embedding_size", embedding_size, embedding_size >= 1, "above 0"),
            ("num_classes", num_classes, num_classes >= 1, "above 0"),
            ("sample_rate", sample_rate, 0 <= sample_rate <= 1, "from 0 to 1"),
            ("scale", scale, 0 < scale < math.inf, "above 0"),
            ("filter_threshold", filter_threshold, 0 <= filter_threshold <= 1, "from 0 to 1"),
            ("expectation_margin", expectation_margin, 0 <= expectation_margin < math.inf, "from 0 on"),
            ("chunk_size", chunk_size, chunk_size is None or chunk_size >= 1, "above 0"),
            *(
                ("stages: sample_rate", stage.sample_rate, 0 <= stage.sample_rate <= 1, "from 0 to 1")
                for stage in stages
            ),
        ):
            if not fits:
                raise UsageError(f"PartialFC: {name} {value}: give a number {allowed}")
        storage, self._device = storage or Storage(), numbered(torch.device(device))
        for name, text, known in (
            ("update: name", update.name if update else "sgd", ("sgd", "adamw")),
            ("storage: placement", storage.placement, ("device", "host", "disk")),
            *(("stages: expectations", stage.expectations, ("off", "moving", "fixed")) for stage in stages),
        ):
            if text not in known:
                raise UsageError(f"PartialFC: {name} {text!r}: give one of {', '.join(known)}")
        if trained and update is None and storage.placement != "device":
            raise UsageError(
                f"placement {storage.placement} needs `update`: optimizers of PyTorch read all rows"
            )
        if stages and (stages[0].first_step or any(a.first_step > b.first_step for a, b in pairwise(stages))):
            raise UsageError(
                "PartialFC: stages must be in the order of their first steps, and the first must begin at step 0"
            )
        if not trained:
            update = None  # a step may then have several calls, and no learning rate
        if update is None and any(stage.expectations != "off" for stage in stages):
            raise UsageError("expectations need `update` and trained=True: a state_dict has no table of them")
        self.num_classes, self.embedding_size, self.group = num_classes, embedding_size, process_group
        # By the rank over all hosts. The local rank would give the same classes to one GPU of each host.
        self._group_size = collectives.world_size(process_group)
        self._rank, ranks = place or (collectives.rank(process_group), self._group_size)
        if self._rank < 0:
            raise UsageError("PartialFC: this rank is not in process_group; build the head on its ranks only")
        self.shard = shard_classes(num_classes, self._rank, ranks)
        self.on_device, self._block = storage.placement == "device", storage.classes_per_block
        self._numbers_on_device = self.shard.size * embedding_size if self.on_device else 0
        self.update_in_backward = update is not None and update.in_backward
        self.product_dtype: torch.dtype | None = None
        """Dtype to which the factors of the large products are rounded; None: bfloat16 by `fp16` or under autocast."""
        self._fp16 = fp16
        self._chunk_size, self._recompute = chunk_size, recompute
        self._sparse, self.seed = sparse, seed
        self._trained, self.update = trained, update
        self.margin = make_margin(
            margin, scale=scale, filter_threshold=filter_threshold, seed=key_of(seed, MARGIN_DRAWS)
        )
        self._margin_state = _names_of_state(self.margin)
        # Stages differ in the sample rate and in the expectations, not in the tables: these are allocated once, for all
        # stages.
        self._stages = tuple(stages) or (Stage(0, sample_rate),)
        self._stage = self._stages[0]
        anchor_margin = make_margin("cosface", scale=self.margin.scale, m3=expectation_margin)
        self._expectations = Expectations(self._stages, anchor_margin)
        self._tables, self.weight = self._allocate(storage)
        self._optimizer = RowOptimizer(update or CenterUpdate(), self._device, seed=key_of(seed, NOISE))
        self._gradient = AccumulatedGradient()
        self._sampler = self._build_sampler()
        self.chunk_type: type[Chunk] | None = None
        """Chunks that kernels compute; None: PyTorch's operations do."""
        self._nearest = NearestCount(process_group)
        self._step, self._calls = 0, 0
        self._begun = False
        """Whether `begin_step` has started a step that is not over."""
        self._loss_scale: Tensor | None = None
        shard_state.register_hooks(self)

    @property
    def device(self) -> torch.device:
        """Device that computes."""
        return self.weight.device if self.update is None and self.on_device else self._device

    @property
    def uses_kernels(self) -> bool:
        """Whether Triton kernels compute the logits, or update the centers."""
        return self.chunk_type is not None or self._optimizer.one_pass

    def use_kernels(self) -> None:
        """Compute with Triton kernels where there are some, on a machine where they are verified."""
        if fused_chunks_available(self.device, self.margin, self._dtype_of_products()):
            self.chunk_type = FusedChunk
        if self.update is not None:
            self._optimizer.one_pass = one_pass_available(self.update, self.device, self.embedding_size)

    def avoid_kernels(self) -> None:
        """Compute with PyTorch's operations from now on: the kernels do not work on this machine."""
        # Both, whichever of them has failed: the self-test is one of whole steps.
        self.chunk_type, self._optimizer.one_pass = None, False

    def train(self, mode: bool = True) -> PartialFC:
        """Train, or evaluate: then centers and running averages stay as they are, also in a backward pass."""
        if isinstance(self.margin, FunctionMargin):
            self.margin.train(mode)
        return super().train(mode)

    def with_classes(self, num_classes: int) -> PartialFC:
        """Return a new head that computes as this one, with other classes and the centers on the device."""
        return PartialFC(
            deepcopy(self.margin),
            self.embedding_size,
            num_classes,
            self._stage.sample_rate,
            process_group=self.group,
            seed=self.seed,
            device=self.device,
            chunk_size=self._chunk_size,
            recompute=self._recompute,
            trained=self._trained,
            update=self.update,
            storage=Storage(self.weight.dtype),
        )

    def __getstate__(self) -> dict[str, Any]:
        # Before the tables are copied: rows of the last step may be on their way to them.
        self._sampler.flush()
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialFC:
        memo[id(self)] = copied = PartialFC.__new__(type(self))
        memo[id(self.group)] = self.group  # the same ranks: a process group cannot be copied
        copied.__setstate__(deepcopy(self.__getstate__(), memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # `copy.deepcopy` gives a parameter memory of its own, apart from the rows that are updated.
        self.weight.data = self._tables.by_name["weight"].data

    def _allocate(self, storage: Storage) -> tuple[RowTables, nn.Parameter]:
        """Return the tables of the centers and of the optimizer's moments, and the former as a parameter."""
        columns = self.embedding_size
        moments: Layout = {} if self.update is None else moment_layout(self.update, columns)
        anchors = self._expectations.layout(columns, storage.dtype)
        if storage.folder is not None:
            storage = replace(storage, folder=storage.folder / f"rank_{self._rank:05d}")
        tables = allocate_tables(
            {"weight": (columns, storage.dtype), **moments, **anchors},
            self.shard.size,
            self._device,
            storage,
            # A stage with all classes reads slices, whatever the other stages do.
            fetched_in_slices=any(stage.sample_rate >= 1 for stage in self._stages),
        )
        centers = tables.by_name["weight"].data
        draw_centers(centers, self.shard, self.seed)
        weight = nn.Parameter(centers, requires_grad=self._trained and self.update is None)
        if self.update is None and self.on_device:
            # The rows of the parameter, wherever it is moved.
            tables.by_name["weight"] = ParameterTable(weight)
        return tables, weight

    def _build_sampler(self) -> ClassSampler:
        return ClassSampler(
            self._tables,
            self.shard,
            self.device,
            self._stage.sample_rate,
            block=self._block,
            seed=self.seed,
            # `step` updates the tables themselves: rows may be copied ahead only if the backward pass updates them.
            prefetch=not self.on_device and self.update_in_backward,
        )

    def begin_step(self, step: int, *, lr: float | None = None, loss_scale: Tensor | None = None) -> None:
        """Start a step, see `BaseHead.begin_step`; without `update` there is no `lr`.

        Raises:
            UsageError: the head has `update`, and `lr` is missing.
        """
        if lr is None and self.update is not None:
            raise UsageError("PartialFC with `update` needs the learning rate: head.begin_step(step, lr=lr)")
        if not self._begun or step != self._step:  # and not before a further micro-batch
            self._gradient = AccumulatedGradient()  # a step that was given up may have left one
            self.margin.begin_step(step)
        self._begun = True
        self._begin(step, lr=lr or 0.0, loss_scale=loss_scale)

    def _begin(self, step: int, *, lr: float = 0.0, loss_scale: Tensor | None = None) -> None:
        stage = next(stage for stage in reversed(self._stages) if stage.first_step <= step)
        if stage is not self._stage:
            self._enter(stage)
        # Before the first forward pass that needs them, from the centers as the last step has left them.
        self._expectations.begin_step(step, self._tables)
        self._step, self._loss_scale = step, loss_scale
        self._optimizer.begin_step(step, self._rank, lr=lr)

    def _enter(self, stage: Stage) -> None:
        """Change to another stage."""
        # Rows of the last step that are still on their way: the new sampler reads the tables.
        self._sampler.flush()
        self._stage = stage
        self._sampler = self._build_sampler()

    def _follow_weight(self) -> None:
        """Read the parameter that is `weight` now: it can be replaced, as by `load_state_dict` with `assign=True`.

        Raises:
            UsageError: it was converted, moved or replaced, and shows no longer the tables of the head; or it is to get
                a gradient, while the head updates it.
        """
        table = self._tables.by_name["weight"]
        if isinstance(table, ParameterTable):
            table.parameter = self.weight
        elif self.weight.data_ptr() != table.data.data_ptr():
            raise UsageError(
                "PartialFC with `update` or a placement has the centers in tables, which `weight` shows; give their "
                "dtype and place to the constructor as `device` and `storage`, and copy other centers into them by "
                "head.weight.copy_(…)"
            )
        if self.update is not None and self.weight.requires_grad:
            raise UsageError(
                "PartialFC with `update` has no gradient for an optimizer: call head.requires_grad_(False); the head "
                "updates its centers nevertheless, except with trained=False"
            )

    def forward(self, embedding_BD: Tensor, label_B: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return self._call(embedding_BD, label_B)
        # The number of the call is a constant to the compiler, which would compile a network with the head in it anew
        # for each. Not by a decorator: it would import the compiler, in three seconds, for those who do not use it.
        global _call_uncompiled
        if _call_uncompiled is None:
            _call_uncompiled = torch.compiler.disable(PartialFC._call)
        return _call_uncompiled(self, embedding_BD, label_B)

    def _call(self, embedding_BD: Tensor, label_B: Tensor) -> Tensor:
        """Return the loss; runs outside of the compiler."""
        if (size := collectives.world_size(self.group)) != self._group_size:
            # Each class would count once for each rank that holds it, or the classes of other ranks never.
            raise UsageError(
                f"PartialFC was built for {count_text(self._group_size, 'rank')}, and is called on {size}; build it "
                "after init_process_group"
            )
        self._follow_weight()
        if self._sampler.device != self.device:
            self._sampler = self._build_sampler()  # the module was moved
        if not self._begun and self.training:
            if self.update is not None:
                # A second call would have another learning rate than its step, or chunks that the update of the first
                # one has changed.
                raise UsageError(
                    "PartialFC with `update`: call head.begin_step(step, lr=lr) before each call; for several calls in "
                    "one step give CenterUpdate(in_backward=False), and call head.step after the last"
                )
            # Nobody counts the steps: each call is one.
            self.margin.begin_step(self._calls)
            self._begin(self._calls)
            self._calls += 1
        # Centers in float64, after `head.double()`, are multiplied by embeddings in float64.
        embedding_BD = embedding_BD.to(torch.promote_types(embedding_BD.dtype, self.weight.dtype))
        if self.update is not None and not embedding_BD.requires_grad:
            # The centers are no leaves of autograd: without one, there were no backward pass, which updates them.
            embedding_BD = embedding_BD.detach().requires_grad_()
        return super().forward(embedding_BD, label_B)

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

        Raises:
            UsageError: the margin returns anything but one number for each sample, or its state gets new names.
        """
        unit_GD, norm_G = gathered_GX, gathered_GX[:, -1] if self.needs_norms else None
        if gathered_GX.shape[1] > self.embedding_size:
            unit_GD = gathered_GX[:, : self.embedding_size]
        product_dtype = self._dtype_of_products()
        gradient = ParameterGradient(self.weight, sparse=self._sparse) if self.weight.requires_grad else None
        sweep = ClassSweep(
            sampled=sampled,
            margin=self.margin,
            group=self.group,
            classes_per_chunk=self.classes_per_chunk(global_batch),
            chunk_type=self.chunk_type or plain_chunk_type(self.margin),
            keeps_exponentials=self._keeps_exponentials(sampled.size * len(unit_GD), product_dtype),
            take_gradient=self._take_gradient(sampled) if gradient is None else gradient.add,
            count_nearest=self._nearest.add if self.counts_nearest else None,
            product_dtype=product_dtype,
            loss_scale=self._loss_scale if self.update_in_backward else None,
            one_pass=self._optimizer.one_pass and self.update_in_backward,
            learns=self.training,
        )
        # The second anchor passes over the same classes, with another table and margin: it is made from the sweep.
        anchor = self._expectations.second_anchor(sweep, self._stage)
        with without_autocast(self.device):
            loss = sharded_cross_entropy(unit_GD, norm_G, replace(sweep, second_anchor=anchor), gradient)
        self._require_same_state()
        if self.update_in_backward and self.training and loss.requires_grad:
            self._begun = False
        return loss

    def step(self, grad_scale: Tensor, skip: Tensor) -> None:
        gradient_of_step, self._gradient = self._gradient, AccumulatedGradient()
        # A NaN would stay in a center for good, and not every loop skips such a step.
        valid = (skip == 0) & gradient_of_step.finite
        # From the tables themselves: with several micro-batches no rows are prefetched, since they would miss this
        # update.
        for rows, gradient in gradient_of_step.by_rows(self._tables.device):
            self._optimizer.update(self._tables.by_name, rows, gradient.div_(grad_scale), valid)
        self._begun = False

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
        return self.num_classes * self._stage.sample_rate

    def count_copies(self) -> None:
        """For a forecast on the meta device: compute as with tables elsewhere, whose slices are fetched as copies."""
        self._numbers_on_device = 0
        for table in self._tables.by_name.values():
            table.copies_slices = True

    def row_state(self) -> dict[str, Tensor]:
        """Return the tables to save in a checkpoint; row i belongs to class shard.start + i."""
        self._follow_weight()
        self._sampler.flush()
        return {name: table.data for name, table in self._tables.by_name.items()}

    def load_rows(self, read: Callable[[str, int, int], Tensor]) -> None:
        for name, table in self.row_state().items():
            if self._expectations.awaits(name):
                continue  # a run whose stages had no expectations has saved none
            # Piece by piece: a whole shard in host memory beside the table would double what a resumed run needs.
            for start, stop in row_pieces(self.shard.size):
                table[start:stop].copy_(read(name, self.shard.start + start, self.shard.start + stop))

    def state(self) -> dict[str, Tensor]:
        return self.margin.state() | self._expectations.state()

    def get_extra_state(self) -> dict[str, Any]:
        """Return what `state_dict` holds beside the weight: the place of its rows, the calls, the averages."""
        return {
            "first_class": self.shard.start,
            "num_classes": self.num_classes,
            "calls": self._calls,
            "averages": {name: tensor.clone() for name, tensor in self.margin.state().items()},
        }

    def set_extra_state(self, state: Any) -> None:
        """Take what `get_extra_state` has returned, on any rank."""
        self._calls, self._begun = state["calls"], False
        self.load_state(state["averages"])
        self._expectations.begin_anew()

    @staticmethod
    def join_state_dicts(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the `state_dict` of all classes from those of all ranks; any number of ranks can load it.

        Those of arcface_torch's `PartialFC_V2` do not have the place of their rows: give them in the order of the
        ranks.

        Raises:
            UsageError: classes are missing, or a rank is there twice.
        """
        return shard_state.join(states)

    def _require_same_state(self) -> None:
        # In the first step, and not when a checkpoint is loaded into a margin that has no such tensors yet.
        if new := set(self.margin.state()) ^ self._margin_state:
            raise UsageError(
                f"the margin {self.margin.name}: {', '.join(sorted(new))} in its state was not there before the first "
                "batch, or is no longer, so that no checkpoint could restore it; create all its tensors in __init__"
            )

    def _dtype_of_products(self) -> torch.dtype | None:
        return self.product_dtype or _product_dtype(self.device, fp16=self._fp16)

    def _keeps_exponentials(self, logits: int, product_dtype: torch.dtype | None) -> bool:
        if self._recompute is not None:
            return not self._recompute
        needed = logits * (product_dtype or torch.float32).itemsize
        return needed <= max(_SMALL_BYTES, 8 * self._numbers_on_device // _KEPT_SHARE)

    def classes_per_chunk(self, global_batch: int) -> int:
        """Return how many classes a chunk has, with so many embeddings of all ranks."""
        if self._chunk_size is not None:
            return self._chunk_size
        # By the global batch and not by the rows that this head has got: accumulated chunks must have the same bounds.
        return default_chunk_size(global_batch, self.embedding_size, self.device.type)

    def _take_gradient(self, sampled: SampledClasses) -> TakeGradient | None:
        """Return the function that takes the gradient of a chunk's centers; None without `update`, or to evaluate."""
        if self.update is None or not self.training:
            return None
        if self.update_in_backward:
            return partial(self._update_in_backward, sampled.tables)
        return self._gradient.of_micro_batch(sampled.host_index_S)

    def _update_in_backward(
        self, tables: RowTables, rows: Rows, gradient: Tensor | UnfinishedGradient, finite: Tensor
    ) -> None:
        if tables.is_written_back:
            raise UsageError(
                "PartialFC: another call of the head, or one of state_dict(), came between this loss and its backward "
                "pass, which would change copies of the centers that were written back; call backward() first"
            )
        self._optimizer.update(tables.by_name, rows, gradient, finite)


def _product_dtype(device: torch.device, *, fp16: bool) -> torch.dtype | None:
    """Return the dtype of the large products by `fp16` or autocast; None: neither is on, or no help on the device."""
    # The meta device has no autocast.
    has_autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    is_help = device.type != "cuda" or multiplies_bfloat16(device)
    return torch.bfloat16 if (fp16 or has_autocast) and is_help else None


def _names_of_state(margin: Margin) -> set[str]:
    first, second = margin.state(), margin.state()
    for name, value in first.items():
        if not isinstance(value, Tensor) or value.data_ptr() != second[name].data_ptr():
            raise UsageError(
                f"the margin {margin.name}: {name} in its state is no tensor, or a new one at each call, so that no "
                "checkpoint could restore it; return the tensor that the margin reads"
            )
    return set(first)
