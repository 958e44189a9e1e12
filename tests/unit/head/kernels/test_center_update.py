"""Update of the centers in one pass: its numbers, its bytes and its code."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.fake_cuda import GPU, fake_cuda
from tests.support.heads import head_step, make_head, make_margin

ROUNDED = {"bfloat16": 2**-7, "int8": 2**-4}
"""Bound of the error of one rounding, in the mean magnitude of these numbers."""


def test_the_update_equals_sgd_in_float64_and_rounds_like_the_torch_operations(found):
    assert len(found["updates"]) == 10
    for case, tables in found["updates"].items():
        assert tables.pop("skipped") and tables.pop("others"), case
        for name, error in tables.items():
            weight = "bfloat16" if case.startswith("bfloat16") else "float32"
            stored = weight if name == "weight" or "and" not in case else case.split("and ")[1].split(" ")[0]
            if stored == "float32":
                assert error["error"] < 1e-6, (case, name, error)
            else:
                # The same random integers: results differ only where float32 sums in another order cross a bound.
                assert error["error"] < 6 * ROUNDED[stored] and error["different"] < 0.005, (
                    case,
                    name,
                    error,
                )
                assert error["bias"] < 0.002, (case, name, error)


def test_the_update_compiles_without_spilling_to_wide_accesses_for_a100_h100_and_b200(compiled):
    assert len(compiled["updates"]) == 12
    for name, found in compiled["updates"].items():
        assert found["spilled_bytes"] == 0 and found["registers"] <= 96, (name, found)
        # 16 bytes at a time: half of the gradient, center and momentum of a thread's numbers, and their results.
        assert found["wide_accesses"] >= 10 and found["shared_bytes"] <= 4096, (name, found)


class MovedBytes(TorchDispatchMode):
    """Counts the bytes that PyTorch's own operations read and write."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "index_select":  # reads the selected rows only
            self.bytes[name] += 2 * result.nbytes
        elif not func.is_view and name not in ("empty", "new_empty", "device"):
            tensors = {id(t): t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)}
            # An expanded tensor has fewer numbers in memory than its shape has.
            self.bytes[name] += sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors.values())
        return result


def step_bytes(patch, classes, **options):
    """Return the bytes that a step of the head moves on a GPU, counted on tensors without content."""
    launches = pytest.importorskip("facetrain.head.kernels.launches")
    for kernel in ("margin_softmax", "center_update"):
        patch.setattr(f"facetrain.head.kernels.{kernel}.can_launch", lambda *_: True)
    patch.setattr("facetrain.head.kernels.margin_softmax._splits", lambda *_: 132)
    with fake_cuda(patch, capability=(9, 0)):
        head = make_head(
            embedding_size=512, num_classes=classes, margin=make_margin("arcface"), weight_decay=5e-4, device=GPU,
            product_dtype=torch.bfloat16, **options,
        )  # fmt: skip
        assert head._optimizer.one_pass
        with launches.shapes_only() as kernels, MovedBytes() as moved:
            head_step(head, 0, patch, batch=256)
    return moved.bytes.total() + kernels.bytes


BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize(
    ("weight", "momentum", "most"), [(BF16, BF16, 24), (BF16, INT8, 22), (FP32, BF16, 42), (FP32, FP32, 46)]
)
def test_a_step_moves_few_bytes_per_number_of_the_centers(weight, momentum, most, monkeypatch):
    few, many = 2**13, 2**14  # one chunk
    options = {"weight_dtype": weight, "momentum_dtype": momentum}
    found = [step_bytes(monkeypatch, classes, **options) for classes in (few, many)]
    # Everything is counted: norms, both logit kernels, both products with their slopes (G x C), the update.
    assert (found[1] - found[0]) / (many - few) / 512 <= most
