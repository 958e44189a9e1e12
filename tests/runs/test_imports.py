"""Imports of a run: each delays its start."""

import re
import subprocess
import sys

import pytest

from tests.support.command import FOR_ADDRESSES, environment

# Not torch._dynamo and SymPy: torch.optim imports them (torch 2.11 to 2.13).
SLOW_TO_IMPORT = {"onnx", "scipy", "sklearn", "tensorboard"}


@pytest.mark.slow
def test_a_run_imports_no_slow_package_that_it_does_not_use(describe, tmp_path):
    command = [sys.executable, "-m", "facetrain", "train", "--config", describe(workers=1, steps=2)]
    every_import = environment(PYTHONPROFILEIMPORTTIME="1")
    done = subprocess.run(
        command, env=every_import, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.M))
    assert "torch" in imported and not imported & (SLOW_TO_IMPORT | FOR_ADDRESSES)
