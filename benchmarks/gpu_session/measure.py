"""Program of one job of a GPU session: measures, and writes rows of expected and measured numbers as JSON.

    python -m benchmarks.gpu_session.measure JOB RESULT

JOB is a job as JSON, RESULT a file. The exit code is 1 if a part of the job failed; the rows of the others are written.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_session import memory, oracles, runs, speed
from benchmarks.gpu_session.rows import Rows
from facetrain.cpu_cores import usable_cores
from facetrain.distributed.process_setup import keep_compiled_code, set_gpu_defaults

_MEASURES: dict[str, Callable[..., Rows]] = {
    "rates": speed.measure_rates,
    "self-test": oracles.self_test,
    "oracle": oracles.compare_head,
    "run": runs.measure_run,
    "sync": runs.check_waits,
    "backbone": speed.measure_backbone,
    "steps": speed.measure_steps,
    "head": speed.measure_head,
    "tests": oracles.run_test,
    "kernels": oracles.compare_kernels,
    "memory": memory.measure_memory,
    "loader": speed.measure_loader,
    "limit": memory.measure_limit,
}
_GPU_STATE = "driver_version,clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu"


def main() -> int:
    """Run the job of the command line; return the exit code."""
    job, result = json.loads(sys.argv[1]), Path(sys.argv[2])
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    # As in a run: the allocator decides what fits, and kernels are compiled once for all jobs.
    set_gpu_defaults()
    keep_compiled_code()
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
    machine = {
        "device": torch.cuda.get_device_name() if cuda else "CPU (rehearsal)",
        "torch": str(torch.version.__version__),
        "Python": sys.version.split()[0],
        "cores": str(usable_cores()),
    }
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={_GPU_STATE}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True)
        machine[_GPU_STATE] = "; ".join(done.stdout.strip().splitlines())
    return machine


if __name__ == "__main__":
    sys.exit(main())
