"""Program of one job of a GPU session: measures, and writes rows of expected and measured numbers as JSON.

    python -m benchmarks.gpu_session.measure JOB RESULT

JOB is a job as JSON, RESULT a file. The exit code is 1 if a part of the job failed; the rows of the others are written.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_session import memory, oracles, speed
from benchmarks.gpu_session.rows import Rows
from facetrain.cpu_cores import usable_cores

_MEASURES: dict[str, Callable[..., Rows]] = {
    "tests": oracles.run_tests,
    "kernels": oracles.compare_kernels,
    "backbone": speed.measure_backbone,
    "head": speed.measure_head,
    "steps": speed.measure_steps,
    "memory": memory.measure_memory,
    "loader": speed.measure_loader,
    "limit": memory.measure_limit,
}


def main() -> int:
    """Run the job of the command line; return the exit code."""
    job, result = json.loads(sys.argv[1]), Path(sys.argv[2])
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    try:
        if job["options"]["device"] == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("there is no CUDA device; --cpu rehearses the session without one")
        for measured in _MEASURES[job["group"]](**job["options"], failures=failures):
            rows.append(measured)
            _write(result, rows, failures)
    except Exception:
        failures.append(traceback.format_exc())
    _write(result, rows, failures)
    print(*failures, sep="\n", file=sys.stderr)
    return 1 if failures else 0


def _write(result: Path, rows: list[dict[str, Any]], failures: list[str]) -> None:
    # After each row: if the job runs out of time, the rows so far are kept.
    result.write_text(
        json.dumps({"rows": rows, "failures": failures, "machine": _machine()}), encoding="utf-8"
    )


def _machine() -> dict[str, str]:
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU (rehearsal)",
        "torch": str(torch.version.__version__),
        "Python": sys.version.split()[0],
        "cores": str(usable_cores()),
    }


if __name__ == "__main__":
    sys.exit(main())
