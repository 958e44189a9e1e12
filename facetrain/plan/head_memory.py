"""Memory of the head on one rank, counted in a step of the head itself: for a GPU on tensors without content."""

# G gathered batch   D embedding   K this rank's classes   S sampled of K

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from facetrain.distributed.world import World
from facetrain.head.build import HeadRun, HeadStage, build_head
from facetrain.head.class_chunk import default_chunk_size
from facetrain.head.partial_fc import PartialFC
from facetrain.head.settings import HeadSettings
from facetrain.head.softmax import are_few
from facetrain.optim.settings import OptimSettings
from facetrain.plan.memory import line_through, remembered
from facetrain.torch_private import LiveBytes, TorchDispatchMode, tree_leaves

_COUNTED_CHUNKS = 2
"""Chunks of a counted step: the memory of more chunks grows in proportion to the classes."""
_COUNTED_RATE = 0.5


@dataclass(frozen=True)
class HeadLoad:
    """Part of a head on the rank with the largest shard, and what a micro-batch asks of it."""

    settings: HeadSettings
    optim: OptimSettings
    embedding_size: int
    rows: int
    """Classes of the shard."""
    global_batch: int
    """Embeddings per call: of all ranks, of one micro-batch."""
    world_size: int
    product_dtype: torch.dtype | None = None
    """Dtype to which the factors of the products are rounded; None: float32."""
    stages: tuple[HeadSettings, ...] = ()
    """Settings in all stages of the run; a table of expectations exists from the first stage on."""
    trained: bool = True
    """False for class centers of a teacher, which have neither moments nor a gradient."""
    cuda: bool = True

    @property
    def local_batch(self) -> int:
        """Images of this rank, whose classes always take part in the step."""
        return min(-(-self.global_batch // self.world_size), self.rows)

    @property
    def sampled(self) -> int:
        """Classes of this rank in the sample of a step, on average."""
        rate = self.settings.sample_rate
        return self.rows if rate >= 1 else round(rate * self.rows + (1 - rate) * self.local_batch)


class HeadWork(NamedTuple):
    """Bytes of a step beside the tables, on the device."""

    peak: int
    """Peak while the backbone's activations exist."""
    accumulated: int
    """Part of `peak`: gradient of the centers that is kept until the end of the step."""
    update: int
    """Peak at the end of a step that has accumulated its gradient; else 0."""


def table_bytes(load: HeadLoad) -> tuple[int, int]:
    """Return the bytes of the class centers and of their moments, wherever they are placed.

    Raises:
        ConfigError: the optimizer cannot keep its moments in the type of the settings.
    """
    centers, moments = _bytes_per_row(replace(load, rows=1, global_batch=1))
    return load.rows * centers, load.rows * moments


@remembered
def _bytes_per_row(load: HeadLoad) -> tuple[int, int]:
    sizes = {name: table.nbytes for name, table in _build(load, torch.device("meta")).row_state().items()}
    centers = sum(sizes.get(name, 0) for name in ("weight", "expectation"))
    return centers, sum(sizes.values()) - centers


def head_work(load: HeadLoad) -> HeadWork:
    """Return the bytes that a step needs beside the tables; of many chunks, by the line through two counted steps."""
    # Decided for all classes, and not for those that are counted.
    settings = load.settings.model_copy(update={"recompute": _recompute(load)})
    load = replace(load, settings=settings)
    low = _COUNTED_CHUNKS * _chunk_size(load)
    if load.sampled <= 2 * low:
        return _count(load, load.sampled)
    lines = zip(_count(load, low), _count(load, 2 * low), strict=True)
    return HeadWork(*(line_through(low, one, 2 * low, two)(load.sampled) for one, two in lines))


def _recompute(load: HeadLoad) -> str:
    """Return whether the head computes the logits again in the backward pass."""
    if load.settings.recompute != "auto":
        return load.settings.recompute
    needed = load.global_batch * load.sampled * (load.product_dtype or torch.float32).itemsize
    return "off" if are_few(needed, load.rows * load.embedding_size) else "on"


def _count(load: HeadLoad, sampled: int) -> HeadWork:
    if load.settings.sample_rate >= 1:
        return _count_step(replace(load, rows=sampled))
    # The tables may be large: a shard with the same sample at a higher rate is counted instead.
    settings = load.settings.model_copy(update={"sample_rate": _COUNTED_RATE})
    rows = round((sampled - (1 - _COUNTED_RATE) * load.local_batch) / _COUNTED_RATE)
    return _count_step(replace(load, settings=settings, rows=max(rows, load.local_batch), stages=()))


@remembered
def _count_step(load: HeadLoad) -> HeadWork:
    """Count all micro-batches and the update of one step."""
    # The head computes otherwise on a CPU, which every machine has.
    head, local = _build(load, torch.device("meta" if load.cuda else "cpu")), load.local_batch
    label_G = torch.full((load.global_batch,), load.rows)  # most images have classes of other ranks
    with _OnMeta(), LiveBytes() as live:
        head.begin_step(0)
        before = live.now
        for number in range(load.optim.accumulate):
            # Other classes in each micro-batch.
            label_G[:local] = (torch.arange(local) * (load.rows // local) + number) % load.rows
            _forward_backward(head, label_G)
        peak, accumulated = live.peak - before, live.now - before
        live.peak = live.now
        if load.trained and not head.update_in_backward:
            scalar = torch.zeros((), device=head.device)
            head.step(scalar + 1, scalar)
        return HeadWork(peak, accumulated, live.peak - before if accumulated else 0)


def _forward_backward(head: PartialFC, label_G: torch.Tensor) -> None:
    columns = head.embedding_size + head.needs_norms
    gathered_GX = torch.zeros(len(label_G), columns, device=head.device, requires_grad=True)
    loss = head.loss_of_gathered(gathered_GX, head.sample_classes(label_G), global_batch=len(label_G))
    loss.backward()


def _build(load: HeadLoad, device: torch.device) -> PartialFC:
    """Build the head with all its tables on a device."""
    world = World(rank=0, local_rank=0, size=1, local_size=1, device=device)
    run = HeadRun(
        stages=tuple(HeadStage(0, stage) for stage in load.stages),
        trained=load.trained,
        product_dtype=load.product_dtype,
        update_in_backward=load.trained and load.optim.accumulate == 1,
    )
    settings = load.settings.model_copy(update={"placement": "device", "chunk_size": _chunk_size(load)})
    size = load.embedding_size
    return build_head(settings, load.optim, run, world, embedding_size=size, num_classes=load.rows)


def _chunk_size(load: HeadLoad) -> int:
    if load.settings.chunk_size != "auto":
        return int(load.settings.chunk_size)
    return default_chunk_size(load.global_batch, load.embedding_size, "cuda" if load.cuda else "cpu")


class _OnMeta(TorchDispatchMode):
    """Stands in for operations that do not exist on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_leaves(args)):
            return func(*args, **(kwargs or {}))
        if name == "_fused_sgd_":  # in place: no memory
            return None
        if name == "equal":  # the samples of two micro-batches differ in the classes of their images
            return False
        if name == "_unique2":  # for the same reason: values, inverse and counts of classes that all differ
            return tuple(torch.empty_like(args[0]) for _ in range(3))
        return func(*args, **(kwargs or {}))
