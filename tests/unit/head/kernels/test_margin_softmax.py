"""Kernels of the head under Triton's interpreter, which runs them on the CPU, in a separate process."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.support.command import ROOT, environment


@pytest.fixture(scope="module")
def found():
    """Output of tests.support.interpret_kernels: name of a case -> largest errors."""
    triton = pytest.importorskip("triton", reason="needs Triton")
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 does not run on NumPy 2.4")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.interpret_kernels"],
        env=environment(TRITON_INTERPRET="1"), cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_statistics_and_slopes_equal_a_float64_reference(found):
    for name, errors in found["kernels"].items():
        limit = 2e-5 if "float32" in name else 2e-2
        assert errors["log_total"] < limit and errors["slopes"] < limit, name


def test_a_head_with_the_kernels_equals_one_without(found):
    for name, errors in found["head"].items():
        assert max(errors.values()) < 1e-5, (name, errors)


def test_nothing_overflows_if_all_cosines_are_1_or_minus_1(found):
    for name, (log_total, expected) in found["ends"].items():
        assert log_total == pytest.approx(expected, rel=1e-6), name


def test_the_kernels_compile_to_tensor_core_code_without_spilling_for_a100_and_h100():
    pytest.importorskip("triton", reason="needs Triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels"],
        env=environment(), cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name, found in json.loads(done.stdout).items():
        assert found["tensor_core_instructions"] > 0 and found["local_memory"] == 0, name
        assert found["shared_bytes"] <= found["shared_bytes_of_the_device"], name


def test_if_the_kernels_cannot_be_launched_a_warning_gives_the_reason():
    kernels = pytest.importorskip("facetrain.head.kernels.margin_softmax", reason="needs Triton")
    with pytest.warns(
        UserWarning, match="Triton kernels cannot run, so it uses slower PyTorch operations: ."
    ):
        assert not kernels.can_launch(torch.device("cpu"), torch.bfloat16)
