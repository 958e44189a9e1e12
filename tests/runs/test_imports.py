"""What a new process of a run imports, which delays its start, and how its threads wait."""

import re
import subprocess
import sys

import pytest

from tests.support.command import FOR_ADDRESSES, environment

# Not torch._dynamo and SymPy: torch.optim imports them (torch 2.11 to 2.13).
SLOW_TO_IMPORT = {"onnx", "scipy", "sklearn", "tensorboard"}


@pytest.mark.slow
def test_a_run_imports_no_slow_package_that_it_does_not_use_and_its_threads_spin_briefly(describe, tmp_path):
    command = [sys.executable, "-m", "facetrain", "train", "--config", describe(workers=1, steps=2)]
    reports = environment(PYTHONPROFILEIMPORTTIME="1", OMP_DISPLAY_ENV="VERBOSE")
    done = subprocess.run(command, env=reports, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.M))
    assert "torch" in imported and not imported & (SLOW_TO_IMPORT | FOR_ADDRESSES)
    assert "GOMP_SPINCOUNT = '10000'" in done.stderr
