"""Collective operations. All ranks must call each of them, in the same order.

With a single process, or without a process group, every operation is the identity: callers need no
case for it. `group` is the process group whose ranks take part; None: all ranks.
"""

# B local batch   G gathered batch (B times the world size)   D embedding   W world size

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from facetrain.device.profiler_ranges import profiler_range

# torch 2.13 renamed these two and warns about the old names; 2.11 and 2.12 know only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ProcessGroup = dist.ProcessGroup

_traffic: list[Counter[str]] = []
_forbidden_in: list[str] = []
_is_alone = ContextVar("_is_alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Let this thread be the only rank within a block: every operation is then the identity."""
    before = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(before)


def world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks."""
    return dist.get_world_size(group) if dist.is_initialized() and not _is_alone.get() else 1


def rank(group: ProcessGroup | None = None) -> int:
    """Return the rank of this process."""
    return dist.get_rank(group) if dist.is_initialized() and not _is_alone.get() else 0


def reaches_hosts(group: ProcessGroup | None) -> bool:
    """Return whether the ranks can exchange CPU tensors: `init_process_group("nccl")` gives them no backend."""
    return world_size(group) == 1 or "cpu:" in dist.get_backend_config(group)


@contextmanager
def measured_traffic() -> Iterator[Counter[str]]:
    """Count the bytes that this rank passes to each kind of collective within the block.

    The gradients that DDP exchanges are not counted.
    """
    counter: Counter[str] = Counter()
    _traffic.append(counter)
    try:
        yield counter
    finally:
        _traffic.remove(counter)


@contextmanager
def forbidden(block: str) -> Iterator[None]:
    """Let every collective within a block fail: a rank that has left the block early would not take part."""
    _forbidden_in.append(block)
    try:
        yield
    finally:
        _forbidden_in.remove(block)


def _record(kind: str, tensor: Tensor) -> None:
    assert not _forbidden_in, (
        f"a collective inside {_forbidden_in[-1]}: a rank that failed takes no part in it"
    )
    for counter in _traffic:
        counter[kind] += tensor.nbytes


class GatheredRows:
    """Asynchronous all-gather of rows, in rank order, with gradient: (B, D) -> (G, D).

    All ranks must have the same B. The gradient of a row is summed over the ranks and multiplied by the
    world size, because DDP divides by it later.
    """

    def __init__(self, x_BD: Tensor, group: ProcessGroup | None = None) -> None:
        """Start sending the rows of this rank."""
        self._x_BD, self._group, self._size = x_BD, group, world_size(group)
        if self._size > 1:
            self._sent_BD = x_BD.detach().contiguous()  # kept alive: the transfer reads it until `wait`
            _record("all_gather", self._sent_BD)
            # Allocated here and not in `wait`: the transfer writes into it from now on.
            self._stacked_WBD = self._sent_BD.new_empty((self._size, *self._sent_BD.shape))
            self._work = _all_gather(
                self._stacked_WBD.view(-1), self._sent_BD.view(-1), group=group, async_op=True
            )

    def wait(self) -> Tensor:
        """Wait for the rows of all ranks and return them: (G, D)."""
        return _Arrived.apply(self._x_BD, self.arrive, self._group) if self._size > 1 else self._x_BD

    def arrive(self) -> Tensor:
        """Wait for the rows of several ranks and return them without gradient: (W, B, D)."""
        with profiler_range("collectives"):
            self._work.wait()
        return self._stacked_WBD


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, arrive: Callable[[], Tensor], group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return arrive().flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad_GD: Tensor) -> tuple[Tensor, None, None]:
        # Each rank has the gradient of all rows by its classes. The sum over the ranks is the gradient by all classes,
        # of which a rank needs its rows only.
        grad_BD = reduce_scatter_rows(grad_GD, ctx.group)
        # The head's loss is a single value over the global batch, not a mean of losses per rank. DDP averages
        # the backbone's gradients over the ranks as if it were such a mean; this factor cancels the division.
        return grad_BD * world_size(ctx.group), None, None


def gather(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Stack every rank's tensor in rank order, without gradient: (...) -> (W, ...)."""
    if world_size(group) == 1:
        return x.detach().unsqueeze(0)
    return GatheredRows(x, group).arrive()


def reduce_scatter_rows(x_GD: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over the ranks and return the rows of this rank: (G, D) -> (B, D). G must be a multiple of W."""
    if world_size(group) == 1:
        return x_GD
    x_GD = x_GD.contiguous()
    _record("reduce_scatter", x_GD)
    kept_BD = x_GD.new_empty((x_GD.shape[0] // world_size(group), *x_GD.shape[1:]))
    with profiler_range("collectives"):
        _reduce_scatter(kept_BD, x_GD, group=group)
    return kept_BD


def sum_(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum x over the ranks in place, and return it."""
    return _start_all_reduce_(x, dist.ReduceOp.SUM, group)()


def max_(x: Tensor) -> Tensor:
    """Take the element-wise maximum of x over the ranks in place, and return it."""
    return start_max_(x)()


def start_max_(x: Tensor) -> Callable[[], Tensor]:
    """Start to take the element-wise maximum in place. Return a function that waits for it and returns it."""
    return _start_all_reduce_(x, dist.ReduceOp.MAX)


def _start_all_reduce_(x: Tensor, op: Any, group: ProcessGroup | None = None) -> Callable[[], Tensor]:
    if world_size(group) == 1:
        return lambda: x
    _record("all_reduce", x)
    # A CPU tensor goes over gloo and a CUDA tensor over NCCL: with the former, ranks agree without waiting for a
    # kernel.
    work = dist.all_reduce(x, op, group, async_op=True)

    def wait() -> Tensor:
        with profiler_range("collectives"):
            work.wait()
        return x

    return wait


def mean_all_(tensors: Iterable[Tensor]) -> None:
    """Average each floating-point tensor over the ranks in place, with one all-reduce per dtype."""
    if world_size() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        # One message for hundreds of small tensors: each message costs a round trip.
        # Divided before the sum, which could overflow: an attention mask has the lowest finite number.
        flat = sum_(torch.cat([tensor.detach().reshape(-1) for tensor in group]) / world_size())
        for tensor, mean in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.detach().copy_(mean.view_as(tensor))


def any_rank(flag: bool) -> bool:
    """Return whether the flag is set on at least one rank."""
    # int32 because no backend reduces bool; on the host because gloo needs no synchronization with the GPU.
    return bool(max_(torch.tensor([flag], dtype=torch.int32)).item())


def gather_json(value: Any) -> list[Any]:
    """Return the value of every rank, in rank order. Values are sent as JSON: unpickling could run code."""
    if world_size() == 1:
        return [value]
    # Two gathers, because a collective needs equal sizes on all ranks: the lengths, then the padded texts.
    encoded = json.dumps(value).encode()
    lengths = gather(torch.tensor([len(encoded)])).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    return [
        json.loads(bytes(row[:length].numpy())) for row, length in zip(gather(padded), lengths, strict=True)
    ]


def broadcast_json(value: Any) -> Any:
    """Return the value of rank 0 on every rank."""
    if world_size() == 1:
        return value
    # Not by `gather_json`: the manifest of 512 ranks has 200 KB, and each of them would get it 512 times.
    encoded = json.dumps(value).encode() if rank() == 0 else b""
    # The length first, which the other ranks do not know.
    length = broadcast_(torch.tensor([len(encoded)]))
    text = torch.zeros(int(length), dtype=torch.uint8)
    if encoded:
        text.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
    return json.loads(bytes(broadcast_(text).numpy()))


def broadcast_(x: Tensor) -> Tensor:
    """Fill x with that of rank 0, and return it."""
    if world_size() == 1:
        return x
    _record("broadcast", x)
    with profiler_range("collectives"):
        dist.broadcast(x, 0)
    return x


def barrier() -> None:
    """Wait until every rank has called this."""
    # Over gloo, as by `dist.barrier`, which `forbidden` would not see: no rank waits for the queue of its GPU.
    sum_(torch.zeros(1, dtype=torch.int32))
