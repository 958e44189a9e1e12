"""Count of the bytes that a step of the head moves on a GPU, on tensors without content."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from facetrain.head import sharded_softmax
from facetrain.head.margins.base import Margin
from tests.support.heads import make_head, margin_settings

GPU = torch.device("cuda:0")


class Context:
    """Stand-in for the `ctx` that autograd passes to a function: autograd does not run on these tensors."""

    saved_tensors: tuple[torch.Tensor | None, ...]
    needs_input_grad = (True, True, True)

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors


class MovedBytes(TorchDispatchMode):
    """Counts the bytes that PyTorch's own operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "index_select":  # reads the selected rows only
            self.bytes[name] += 2 * result.nbytes
        elif not func.is_view and name not in ("empty", "new_empty", "device"):
            tensors = {id(t): t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)}
            # An expanded tensor has fewer numbers in memory than its shape has.
            self.bytes[name] += sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors.values())
        return result


def step_bytes(patch: Any, classes: int, *, one_pass: bool = True, **options: Any) -> int:
    """Return the bytes that a step of the head moves on a GPU with 256 embeddings of 512 numbers.

    `patch` is pytest's monkeypatch; `one_pass`: the Triton kernel updates the centers.
    """
    pytest.importorskip("triton")
    kernels = 0

    def launch(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        nonlocal kernels
        kernels += sum(each.nbytes for each in arguments if isinstance(each, torch.Tensor))

    def update_centers(tables: Any, rows: slice, gradient: Any, *arguments: Any, **numbers: Any) -> None:
        nonlocal kernels
        # Rows of the tables are read and written, the rest is read.
        kernels += 2 * sum(table[rows].nbytes for table in tables.values())
        kernels += sum(each.nbytes for each in gradient)

    patch.setattr("facetrain.head.kernels.margin_softmax.launch", launch)
    patch.setattr("facetrain.head.kernels.center_update.update_centers", update_centers)
    patch.setattr("facetrain.head.partial_fc.one_pass_available", lambda *_: one_pass)
    # The threads that draw centers would share the fake mode; the fused kernel has no form without content.
    patch.setattr("facetrain.head.partial_fc.draw_centers", lambda *_: None)
    patch.setattr(torch, "_fused_sgd_", lambda *_, **__: None)
    patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    # Autograd, which differentiates the margin, needs a GPU for such tensors.
    patch.setattr(Margin, "_differentiated", lambda margin, formula, cos: (formula(cos), cos))
    context, function = Context(), sharded_softmax._CrossEntropy
    patch.setattr(function, "apply", lambda *arguments: function.forward(context, *arguments))
    with FakeTensorMode(allow_non_fake_inputs=True):
        head = make_head(
            embedding_size=512, num_classes=classes, margin=margin_settings("arcface"), weight_decay=5e-4, device=GPU,
            product_dtype=torch.bfloat16, **options,
        )  # fmt: skip
        assert head._optimizer.one_pass == one_pass
        with MovedBytes() as moved:
            head.begin_step(0, lr=0.1)
            head(torch.empty(256, 512, device=GPU), torch.empty(256, dtype=torch.int64, device=GPU))
            with torch.no_grad():  # as autograd calls it
                function.backward(context, torch.empty((), device=GPU))
    return moved.bytes.total() + kernels
