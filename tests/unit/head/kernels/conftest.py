"""Results of the kernels in a process of their own, which the tests of this folder share."""

import numpy as np
import pytest

from tests.support.command import printed_by


@pytest.fixture(scope="session")
def found():
    """Return the output of tests.support.interpret_kernels: name of a case -> errors of the kernels on the CPU.

    Its tests have the mark `xdist_group`, with which one worker runs them all and computes it once.
    """
    triton = pytest.importorskip("triton", reason="needs Triton")
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 does not run on NumPy 2.4")
    return printed_by("interpret_kernels", TRITON_INTERPRET="1")


@pytest.fixture
def compiled(request):
    """Return what the code of kernels uses: name of a kernel and GPU -> counts.

    The parameter has the kernels and the capabilities of the GPUs. Those for which Triton writes the same PTX are left
    to the long tests but for one.
    """
    pytest.importorskip("triton", reason="needs Triton")
    from tests.support.compile_kernels import KERNELS

    name, *capabilities = request.param.split()
    found = KERNELS[name]([int(capability) for capability in capabilities])
    assert len(found) == 4 * len(capabilities)
    return found
