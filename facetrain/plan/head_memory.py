"""Memory of the head on one rank, counted in a step of the head itself on tensors without content."""

# G gathered batch   K this rank's classes

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from facetrain.distributed.world import World
from facetrain.head.build import HeadRun, build_head, stage_of
from facetrain.head.class_chunk import default_chunk_size
from facetrain.head.partial_fc import PartialFC
from facetrain.head.settings import HeadSettings
from facetrain.optim.settings import OptimSettings
from facetrain.torch_private import LiveBytes, TorchDispatchMode, tree_leaves


@dataclass(frozen=True)
class HeadLoad:
    """A head on the rank with the largest shard, and what a micro-batch asks of it."""

    settings: HeadSettings
    optim: OptimSettings
    embedding_size: int
    rows: int
    """Classes of the shard."""
    local_batch: int
    """Images of this rank, whose classes always take part in the step."""
    global_batch: int
    """Embeddings per call: of all ranks, of one micro-batch."""
    product_dtype: torch.dtype | None = None
    """Dtype to which the factors of the products are rounded; None: float32."""
    stages: tuple[HeadSettings, ...] = ()
    """Settings in all stages of the run; a table of expectations exists from the first stage on; (): one stage."""
    trained: bool = True
    """False for class centers of a teacher, which have neither moments nor a gradient."""


class HeadMemory(NamedTuple):
    """Bytes of a head, and of a step with it."""

    centers: int
    """Class centers, and their expectations, wherever they are placed."""
    moments: int
    """Moments of the optimizer, beside the centers."""
    peak: int
    """Peak of the work while the backbone's activations exist."""
    accumulated: int
    """Part of `peak`: gradient of the centers that is kept until the end of the step."""
    update: int
    """Peak at the end of a step that has accumulated its gradient; else 0."""


def head_memory(load: HeadLoad) -> HeadMemory:
    """Count the micro-batches and the update of one step.

    The Triton kernels cannot be counted where Triton is absent: PyTorch's chunks need about as much.

    Raises:
        ConfigError: the optimizer cannot keep its moments in the type of the settings.
    """
    head, local = _build(load), min(load.local_batch, load.rows)
    sizes = {name: table.nbytes for name, table in head.row_state().items()}
    centers = sum(sizes.get(name, 0) for name in ("weight", "expectation"))
    label_G = torch.full((load.global_batch,), load.rows)  # most images have classes of other ranks
    counted = load.optim.accumulate
    if load.settings.sample_rate == 1:  # of a sample, each micro-batch adds the classes of its images
        counted = min(counted, 2)
    with _OnMeta(), LiveBytes() as live:
        head.begin_step(0, lr=0.0)
        before = live.now
        for number in range(counted):
            # Other classes in each micro-batch.
            label_G[:local] = (torch.arange(local) * (load.rows // local) + number) % load.rows
            _forward_backward(head, label_G)
        peak, accumulated = live.peak - before, live.now - before
        live.history = [live.now]
        if not head.update_in_backward:
            scalar = torch.zeros((), device=head.device)
            head.step(scalar + 1, scalar)
        update = live.peak - before if accumulated else 0
    return HeadMemory(centers, sum(sizes.values()) - centers, peak, accumulated, update)


def _build(load: HeadLoad) -> PartialFC:
    """Build the head with all its tables, without their memory."""
    device = torch.device("meta")
    run = HeadRun(
        # The head computes with the last of them; the others decide only which tables exist.
        stages=tuple(stage_of(0, stage) for stage in (*load.stages, load.settings)),
        trained=load.trained,
        product_dtype=load.product_dtype,
        update_in_backward=load.optim.accumulate == 1,
    )
    size, chunk = load.embedding_size, load.settings.chunk_size
    if chunk == "auto":
        chunk = default_chunk_size(load.global_batch, size, "cuda")
    settings = load.settings.model_copy(update={"placement": "device", "chunk_size": chunk})
    world = World(rank=0, local_rank=0, size=1, local_size=1, device=device)
    head = build_head(settings, load.optim, run, world, embedding_size=size, num_classes=load.rows)
    if load.settings.placement != "device":
        head.count_copies()
    return head


def _forward_backward(head: PartialFC, label_G: torch.Tensor) -> None:
    columns = head.embedding_size + head.needs_norms
    gathered_GX = torch.zeros(len(label_G), columns, device=head.device, requires_grad=True)
    loss = head.loss_of_gathered(gathered_GX, head.sample_classes(label_G), global_batch=len(label_G))
    loss.backward()


class _OnMeta(TorchDispatchMode):
    """Stands in for operations that do not exist on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_on_meta = any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_leaves(args))
        if is_on_meta and func.overloadpacket.__name__ == "_fused_sgd_":  # in place: no memory
            return None
        return func(*args, **(kwargs or {}))
