"""A GPU that is not there: tensors with a device, a shape and a dtype, but no content.

What mixes devices fails as on a GPU. So does what asks a tensor for its content, for which the host would wait:
here there is none. Autograd needs a real device: a function's two halves are called one after the other.
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
    """What autograd hands to the halves of a function."""

    saved_tensors: tuple[Tensor | None, ...]
    needs_input_grad = (True, True, True)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


class _Copies(TorchDispatchMode):
    """Lists the copies between host and GPU for whose end the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _COPIES:
            there, here = result.device.type, args[func is _COPIES[1]].device.type
            asked = kwargs.get("non_blocking", len(args) > 2 and args[2])
            if {there, here} == {"cpu", "cuda"} and not asked:
                self.waiting.append(f"{func}: {tuple(result.shape)} from {here} to {there}")
        return result


@contextmanager
def made_up_gpu(patch: Any) -> Iterator[list[str]]:
    """Within, tensors may be made on GPU; what is yielded lists the copies that the host has waited for.

    `patch` is pytest's monkeypatch: the fused optimizers know no tensors without content. The GPU is one that
    Triton's kernels do not serve.
    """
    patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    for name in ("_fused_sgd_", "_fused_adamw_"):
        patch.setattr(torch, name, _step_alike)
    with FakeTensorMode(allow_non_fake_inputs=True), _Copies() as copies:
        yield copies.waiting


def _step_alike(
    *lists: Any,
    momentum: float = 0.0,
    found_inf: Tensor | None = None,
    grad_scale: Tensor | None = None,
    **_: Any,
) -> None:
    """Ask of tensors what the fused kernels ask on CUDA."""
    moments = [each for each in lists[2:] if each and each[0].dim()]
    assert len(moments) == (1 if momentum else 2 if len(lists) > 3 else 0)
    for tensors in zip(*lists[:2], *moments, strict=True):
        assert {tensor.device for tensor in tensors} == {GPU}
        assert len({(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors}) == 1
    assert all(scalar is None or scalar.device == GPU for scalar in (found_inf, grad_scale))
