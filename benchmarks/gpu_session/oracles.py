"""Jobs of a GPU session that check results: the tests on the device, and the kernels beside float64."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_session.rows import Rows, row

_LINES_OF_ERRORS = 30
_FURTHER_THAN_TORCH = 5.0
"""A fused kernel may have an error this many times as large as PyTorch's operations."""
_ROUNDING = 5e-2
"""Error that rounding to 16 bits explains."""


def run_tests(device: str, path: str, failures: list[str]) -> Rows:
    """Run a test file and yield the numbers of passed, failed and skipped tests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        # -W default: warnings of packages that this machine happens to have are no errors.
        options = ("-q", "-p", "no:cacheprovider", "-W", "default", f"--junitxml={report}")
        command = [sys.executable, "-m", "pytest", path, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not report.exists():
            failures.append(_end_of(done.stdout))
            return
        suite = ElementTree.parse(report).getroot()
        suite = suite if suite.tag == "testsuite" else suite[0]
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    yield row(path, "passed", counts["tests"] - failed - counts["skipped"])
    yield row(path, "failed", failed)
    yield row(path, "skipped", counts["skipped"])
    if failed or done.returncode:
        failures.append(_end_of(done.stdout))


def compare_kernels(device: str, module: str, failures: list[str]) -> Rows:
    """Run a module that prints errors as JSON; yield the largest of each case, beside that of PyTorch's operations."""
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True)
    if done.returncode:
        failures.append(_end_of(done.stderr))
        return
    for case, errors in json.loads(done.stdout.strip().splitlines()[-1]).items():
        pairs = [error for error in errors.values() if isinstance(error, dict) and "fused" in error]
        what = f"{module.split('.')[-1]}: {case}"
        if pairs:
            worst = max(pairs, key=lambda error: error["fused"])
            yield row(what, "largest error, expected: PyTorch's", worst["fused"], worst["plain"])
            ratio = statistics.median(error["fused"] / max(error["plain"], 1e-9) for error in pairs)
            yield row(what, "median error over PyTorch's", ratio)
            if any(error["fused"] > _FURTHER_THAN_TORCH * error["plain"] + _ROUNDING for error in pairs):
                failures.append(f"{what}: an error is far above PyTorch's: {json.dumps(errors)}")
        else:
            largest = max(_differences(errors))
            yield row(what, "largest error", largest)
            if largest > _ROUNDING:
                failures.append(f"{what}: {json.dumps(errors)}")


def _differences(errors: Any) -> list[float]:
    """Return all errors in nested values; a list of two numbers is a result beside its true value."""
    if isinstance(errors, dict):
        return [found for value in errors.values() for found in _differences(value)]
    return [abs(errors[0] - errors[1])] if isinstance(errors, list) else [abs(errors)]


def _end_of(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-_LINES_OF_ERRORS:])
