"""Kernels of the head under Triton's interpreter, which runs them on the CPU, in a separate process."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.mark.xdist_group("found")
@pytest.mark.slow
def test_statistics_and_exponentials_equal_a_float64_reference(found):
    assert len(found["kernels"]) == 5
    for name, errors in found["kernels"].items():
        limit = 5e-5 if "float32" in name else 2e-2
        assert all(error < limit for error in errors.values()), (name, errors)


@pytest.mark.xdist_group("found")
@pytest.mark.slow
def test_a_head_with_the_kernels_equals_one_without(found):
    assert len(found["head"]) == 4
    for name, errors in found["head"].items():
        assert all(error < 1e-5 for error in errors.values()), (name, errors)


@pytest.mark.xdist_group("found")
@pytest.mark.slow
def test_nothing_overflows_if_all_cosines_are_1_or_minus_1(found):
    assert len(found["ends"]) == 4
    for name, (log_total, expected) in found["ends"].items():
        assert log_total == pytest.approx(expected, rel=1e-6), name


@pytest.mark.xdist_group("found")
def test_a_center_that_is_not_a_number_is_hidden_by_no_filter(found):
    assert found["hidden"] == {"inf": False, "3.2": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiled",
    ["softmax 86 90 100 120", pytest.param("softmax 80 89", marks=pytest.mark.long)],
    indirect=True,
)
def test_the_kernels_compile_to_tensor_core_code_without_spilling_for_each_generation_of_gpus(compiled):
    for name, found in compiled.items():
        # A filter is rare: one kernel may be slower with it.
        most = 512 if "filter" in name else 0
        assert found["tensor_core_instructions"] > 0 and found["spilled_bytes"] <= most, name
        assert found["shared_bytes"] <= found["shared_bytes_of_the_device"], name


@pytest.mark.parametrize(
    ("capability", "columns"), [((8, 0), 128), ((9, 0), 256), ((10, 0), 128), ((12, 0), 128)]
)
def test_the_compiled_tiles_are_those_of_each_generation_of_gpus(capability, columns, monkeypatch):
    kernels = pytest.importorskip("facetrain.head.kernels.margin_softmax", reason="needs Triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert kernels._columns(torch.device("cuda:0")) == columns


@pytest.mark.parametrize(("batch", "classes"), [(1, 2**26), (300, 2**24)])
def test_the_grid_of_a_chunk_of_many_classes_is_within_the_limits_of_cuda(batch, classes, monkeypatch):
    kernels = pytest.importorskip("facetrain.head.kernels.margin_softmax", reason="needs Triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    grids = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, *arguments, **options: grids.append(grid))
    with FakeTensorMode(allow_non_fake_inputs=True):
        unit, weight, inverse, position, statistics = (
            torch.empty(*size, dtype=torch.bfloat16, device="cuda:0")
            for size in ((batch, 512), (classes, 512), (classes,), (batch,), (2, batch))
        )
        kernels.add_statistics(statistics, kernels.LogitFactors(unit, weight, inverse, position, 0, 1.0))
        kernels.narrowed(weight, torch.bfloat16, inverse)
    assert len(grids) == 2
    for first, *others in grids:
        assert first < 2**31 and all(programs < 2**16 for programs in others)
