"""Update of the centers in one pass: its numbers, its bytes and its code."""

import pytest
import torch

from tests.support.head_traffic import step_bytes

ROUNDED = {"bfloat16": 2**-7, "int8": 2**-4}
"""Bound of the error of one rounding, in the mean magnitude of these numbers."""


@pytest.mark.xdist_group("found")
@pytest.mark.slow
def test_the_update_equals_sgd_in_float64_and_rounds_like_the_torch_operations(found):
    assert len(found["updates"]) == 9
    for case, tables in found["updates"].items():
        assert not tables.pop("is_changed_if_skipped") and not tables.pop("changes_others"), case
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiled",
    ["updates 90 120", pytest.param("updates 80 86 89 100", marks=pytest.mark.long)],
    indirect=True,
)
def test_the_update_compiles_without_spilling_to_wide_accesses_for_each_generation_of_gpus(compiled):
    for name, found in compiled.items():
        assert found["spilled_bytes"] == 0 and found["registers"] <= 96, (name, found)
        # 16 bytes at a time: half of the gradient, center and momentum of a thread's numbers, and their results.
        assert found["wide_accesses"] >= 10 and found["shared_bytes"] <= 4096, (name, found)


BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize(
    ("weight", "momentum", "most"), [(BF16, BF16, 22), (BF16, INT8, 20), (FP32, BF16, 36), (FP32, FP32, 40)]
)
def test_a_step_moves_few_bytes_per_number_of_the_centers(weight, momentum, most, monkeypatch):
    few, many = 2**13, 2**14  # one chunk
    options = {"weight_dtype": weight, "momentum_dtype": momentum}
    found = [step_bytes(monkeypatch, classes, **options) for classes in (few, many)]
    # Everything is counted: norms, both logit kernels, both products with their slopes (G x C), the update.
    assert (found[1] - found[0]) / (many - few) / 512 <= most
