"""Fake CUDA device: tensors with a device, a shape and a dtype, but without content.

Operations that mix devices fail as they do on a GPU. Reading a tensor's content, for which the host would wait for
the GPU, fails too, because there is none. Autograd does not run on the fake device: a test calls the forward and the
backward method of a function itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda:0")
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Context:
    """Stand-in for the `ctx` that autograd passes to a function."""

    saved_tensors: tuple[Tensor | None, ...]
    needs_input_grad = (True, True, True)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


class _BlockingCopies(TorchDispatchMode):
    """Records the copies between host and GPU that block the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _COPIES:
            destination, source = result.device.type, args[func is _COPIES[1]].device.type
            non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
            if {destination, source} == {"cpu", "cuda"} and not non_blocking:
                self.found.append(f"{func}: {tuple(result.shape)} from {source} to {destination}")
        return result


class FakeStream:
    """CUDA stream that only counts how often the host waits for it."""

    waits = 0
    current: "FakeStream | None" = None

    def __init__(self, device: torch.device | None = None) -> None:
        self.waited_for: list[Any] = []

    def record_event(self) -> object:
        return object()

    def wait_event(self, event: object) -> None:
        self.waited_for.append(event)

    def wait_stream(self, stream: "FakeStream") -> None:
        self.waited_for.append(stream)

    def synchronize(self) -> None:
        FakeStream.waits += 1


@contextmanager
def _use(stream: FakeStream) -> Iterator[None]:
    before, FakeStream.current = FakeStream.current, stream
    yield
    FakeStream.current = before


def fake_streams(patch: Any) -> None:
    """Replace CUDA's streams by ones that need no GPU. Work on them is done at once."""
    computing = FakeStream()
    FakeStream.waits, FakeStream.current = 0, None
    patch.setattr(torch.cuda, "Stream", FakeStream)
    patch.setattr(torch.cuda, "stream", _use)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream.current or computing)
    patch.setattr(Tensor, "record_stream", lambda tensor, stream: None)


@contextmanager
def fake_cuda(patch: Any, capability: tuple[int, int] = (7, 0)) -> Iterator[list[str]]:
    """Allow tensors on GPU inside the block; yield the list of copies that have blocked the host.

    `patch` is pytest's monkeypatch: it replaces the fused optimizer kernels, which reject tensors without content, and
    sets a compute capability, by default one for which the Triton kernels are not used.
    """
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for name in ("_fused_sgd_", "_fused_adamw_"):
        patch.setattr(torch, name, _check_fused_arguments)
    # Page-locked memory belongs to a real device.
    patch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    with FakeTensorMode(allow_non_fake_inputs=True), _BlockingCopies() as copies:
        yield copies.found


def _check_fused_arguments(
    *lists: Any,
    momentum: float = 0.0,
    found_inf: Tensor | None = None,
    grad_scale: Tensor | None = None,
    **_: Any,
) -> None:
    """Check what the fused kernels require of their tensors on CUDA."""
    moments = [each for each in lists[2:] if each and each[0].dim()]
    assert len(moments) == (1 if momentum else 2 if len(lists) > 3 else 0)
    for tensors in zip(*lists[:2], *moments, strict=True):
        assert {tensor.device for tensor in tensors} == {GPU}
        assert len({(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors}) == 1
    assert all(scalar is None or scalar.device == GPU for scalar in (found_inf, grad_scale))
