"""Data-parallel wrapping of a network (`torch.nn.parallel.DistributedDataParallel`)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future, collect_all
from torch.nn.parallel import DistributedDataParallel

from facetrain.distributed.world import World

# torch 2.13 renamed the option from `broadcast_buffers`.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)
LOCAL_BUFFERS: dict[str, Any] = {_SYNC_BUFFERS: False}
"""DDP option that leaves the buffers alone: each rank keeps its batch norm statistics, which are averaged over the
ranks for verification and for checkpoints only."""


def wrap_in_ddp(network: nn.Module, world: World, compress: str, *, accumulate: int = 1) -> nn.Module:
    """Wrap a network in DDP; return it unchanged if there is only one rank.

    `compress` is the format in which gradients are exchanged: "none" (their own), "fp16" or "bf16".
    `accumulate` is the number of micro-batches per step.
    """
    if world.size == 1:
        return network
    # Imported here: a single process does not need it.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapped = data_parallel(network, world.device, accumulate)
    # Their sums are in the short format too: half of the traffic, and rounded gradients.
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    if compress in hooks:
        wrapped.register_comm_hook(None, hooks[compress])
    elif world.size > 2 and (world.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()):
        # A lambda: DDP compares annotations with classes, and here they are strings.
        wrapped.register_comm_hook(None, lambda _, bucket: average_each_gradient(bucket))
    return wrapped


def data_parallel(network: nn.Module, device: torch.device, accumulate: int) -> DistributedDataParallel:
    """Return a network in DDP with the options of a run, of which `accumulate` micro-batches make a step.

    With several micro-batches, the gradients are zeros in DDP's buckets, and stay there as long as none becomes None.
    """
    if accumulate > 1:
        # Otherwise the micro-batches before the last one would add up outside of the buckets: a second copy.
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    return DistributedDataParallel(
        network,
        device_ids=[device] if device.type == "cuda" else None,
        # Gradients live in DDP's buckets: no second copy of them.
        gradient_as_bucket_view=True,
        # A static graph must exchange gradients in every backward pass. With gradient accumulation only the
        # last micro-batch does.
        static_graph=accumulate == 1,
        **LOCAL_BUFFERS,
    )


def average_each_gradient(bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Average the gradients of a bucket over the ranks, one collective for each parameter.

    DDP changes the order of the parameters in its buckets after the first step of a process. In a ring of three or more
    ranks, the order in which the ranks' values are added depends on the place in the bucket, so a resumed run would
    differ by rounding from one that was not interrupted. The place in the parameter's own gradient never changes. On a
    GPU the many small collectives cost time, so only `train.deterministic` asks for them.
    """
    size = dist.get_world_size()
    sums = []
    for gradient in bucket.gradients():
        # Divided before the sum, as DDP does.
        work = dist.all_reduce(gradient.div_(size), async_op=True)
        assert work is not None
        sums.append(work.get_future())
    # A future of NCCL is complete when its collective is enqueued, and makes the stream that waits for it wait for the
    # GPU. One of `collect_all` makes no stream wait. NCCL carries out its collectives in order: the last one is enough.
    averaged = sums[-1] if bucket.buffer().is_cuda else collect_all(sums)
    return averaged.then(lambda _: bucket.buffer())
