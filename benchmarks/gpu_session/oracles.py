"""Jobs of a GPU session that check results: self-test, kernels beside float64, tests on the device."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.gpu_session.rows import Rows, row

_LINES_OF_ERRORS = 30
_ROUNDING = 5e-2
"""Error that rounding to 16 bits explains."""


def self_test(device: str, precision: str, failures: list[str]) -> Rows:
    """Yield the verdict of the self-test with which a run decides whether it uses the kernels."""
    import torch

    from facetrain.training.kernel_verdicts import agree_on_kernels

    # Triton's interpreter, which a rehearsal uses, cuts float32 off to bfloat16 instead of rounding it.
    dtypes = {"bf16": torch.bfloat16 if device == "cuda" else torch.float16, "fp16": torch.float16}
    reason = agree_on_kernels(torch.device(device), dtypes[precision])
    yield row(f"head, {precision}", "verdict", reason or "usable")
    if reason:
        failures.append(f"head, {precision}: {reason}")


def run_test(device: str, test: str, failures: list[str]) -> Rows:
    """Run a test function and yield its outcome."""
    # -W default: warnings of packages that this machine happens to have are no errors.
    options = ("-q", "-p", "no:cacheprovider", "-W", "default")
    command = [sys.executable, "-m", "pytest", test, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    yield row(test, "outcome", done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output")
    if done.returncode:
        failures.append(_end_of(done.stdout))


def compare_kernels(device: str, module: str, failures: list[str]) -> Rows:
    """Run a module that prints errors as JSON; yield the largest of each case."""
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True)
    if done.returncode:
        failures.append(_end_of(done.stderr))
        return
    for case, errors in json.loads(done.stdout.strip().splitlines()[-1]).items():
        what = f"{module.split('.')[-1]}: {case}"
        largest = max(_differences(errors))
        yield row(what, "largest error", largest)
        if largest > _ROUNDING:
            failures.append(f"{what}: {json.dumps(errors)}")


def _differences(errors: Any) -> list[float]:
    """Return all errors in nested values.

    A list of two numbers is a result beside its true value, and true is an error of 1. `different` is no error: the
    share of numbers that PyTorch's operations round in the other direction.
    """
    if isinstance(errors, dict):
        return [found for key, value in errors.items() if key != "different" for found in _differences(value)]
    return [abs(errors[0] - errors[1])] if isinstance(errors, list) else [abs(errors)]


def _end_of(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-_LINES_OF_ERRORS:])
