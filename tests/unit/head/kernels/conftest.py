"""Results of the kernels in a process of their own, which the tests of this folder share."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.support.command import ROOT, environment


def report(module, *arguments, **variables):
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}", *arguments],
        env=environment(**variables), cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def found():
    """Return the output of tests.support.interpret_kernels: name of a case -> errors of the kernels on the CPU."""
    triton = pytest.importorskip("triton", reason="needs Triton")
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 does not run on NumPy 2.4")
    return report("interpret_kernels", TRITON_INTERPRET="1")


@pytest.fixture
def compiled(request):
    """Return the output of tests.support.compile_kernels: name of a kernel and GPU -> what its code uses."""
    pytest.importorskip("triton", reason="needs Triton")
    return report("compile_kernels", request.param)
