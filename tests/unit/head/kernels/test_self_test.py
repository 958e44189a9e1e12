"""The self-test with which a run decides whether it uses the kernels."""

import subprocess
import sys

import numpy as np
import pytest

from tests.support.command import ROOT, environment

SELF_TEST = """
import torch, facetrain.head.partial_fc as head
from facetrain.head.kernels import center_update, margin_softmax
from facetrain.training import kernel_self_test
from facetrain.training.kernel_self_test import KernelWork, check_head
# The interpreter takes as long for a small tile as for a large one. Small chunks have one tile of columns, a whole one
# has two.
margin_softmax._CENTERS, center_update._TILE = 64, 64 * 128
kernel_self_test._CHUNK = 40
head.fused_chunks_available = lambda _, margin, dtype: dtype is not None
head.one_pass_available = lambda *_: True
print([check_head(torch.device("cpu"), KernelWork(72, 137, 170))])
"""


@pytest.mark.slow
def test_the_self_test_passes():
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 does not run on NumPy 2.4")
    done = subprocess.run(
        [sys.executable, "-c", SELF_TEST],
        env=environment(TRITON_INTERPRET="1"), cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "['']\n", done.stdout + done.stderr
