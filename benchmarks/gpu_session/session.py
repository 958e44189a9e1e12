"""A GPU session: jobs in processes of their own, in slices of a few minutes, with the state in one JSON file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_session.jobs import Job
from facetrain.files import write_atomically

_MOST_ATTEMPTS = 2
"""Times that a job is begun if the whole session was killed each time before the job's end."""
_RESERVE_SECONDS = 10
"""Part of a slice that is left for ending the last process and writing the page."""
_LINES_OF_ERRORS = 15
_FINISHED = ("done", "failed", "timed out")

RunJob = Callable[[Job, float], dict[str, Any]]
"""Runs a job for some seconds at most; returns its record: `status`, and `result` or `error`."""


class Session:
    """State of the jobs, in memory and in a file."""

    def __init__(self, path: Path, jobs: Sequence[Job]) -> None:
        """Read the state of earlier slices from `path`, if it exists."""
        self._path, self._jobs = path, jobs
        self.state: dict[str, Any] = {"jobs": {}}
        if path.exists():
            self.state = json.loads(path.read_text(encoding="utf-8"))

    def unfinished(self) -> list[Job]:
        """Return the jobs that have no result yet, in order."""
        return [job for job in self._jobs if self._status(job) not in _FINISHED]

    def failed(self) -> list[Job]:
        """Return the jobs that have failed or were stopped."""
        return [job for job in self._jobs if self._status(job) in _FINISHED[1:]]

    def forget_failed(self) -> None:
        """Let failed jobs run again."""
        for job in self.failed():
            del self.state["jobs"][job.name]

    def run_slice(self, seconds: float, run: RunJob, report: Callable[[str], None]) -> None:
        """Run unfinished jobs until `seconds` are spent.

        A job begins if the rest of the slice is its expected time, and longer than the part of an earlier slice in
        which it did not end. If the slice ends first, it runs again in the next one.
        """
        longest = seconds - _RESERVE_SECONDS
        end = time.monotonic() + longest
        for job in self.unfinished():
            rest = end - time.monotonic()
            needed = max(job.seconds, self.state["jobs"].get(job.name, {}).get("seconds", 0) + 1)
            if rest >= min(needed, longest - 1):
                self._run(job, min(job.limit, rest), min(job.limit, longest - 1), run, report)

    def _run(self, job: Job, limit: float, full: float, run: RunJob, report: Callable[[str], None]) -> None:
        """Run a job for at most `limit` seconds; it has timed out only if that is its `full` time."""
        attempts = self.state["jobs"].get(job.name, {}).get("attempts", 0) + 1
        record: dict[str, Any] = {"group": job.group, "attempts": attempts}
        if attempts > _MOST_ATTEMPTS:
            record |= {
                "status": "failed",
                "error": [f"the session ended during this job {_MOST_ATTEMPTS} times"],
            }
        else:
            # Written first: if this job takes the machine down, the next slice knows.
            self._write(job, record | {"status": "running"})
            start = time.monotonic()
            record |= run(job, limit)
            if machine := record.get("result", {}).pop("machine", None):
                self.state["machine"] = machine
            record["seconds"] = round(time.monotonic() - start, 1)
            if record["status"] == "timed out" and limit < full:
                record |= {"status": "cut", "attempts": attempts - 1}
        self._write(job, record)
        report(f"{record['status']:10}{record.get('seconds', 0):7.1f} s  {job.name}")

    def _status(self, job: Job) -> str:
        return str(self.state["jobs"].get(job.name, {}).get("status", ""))

    def _write(self, job: Job, record: dict[str, Any]) -> None:
        self.state["jobs"][job.name] = record
        write_atomically(self._path, json.dumps(self.state, indent=1))


def run_in_process(
    job: Job, limit: float, *, checkout: Path, packages: Sequence[Path], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run a job's program in a new process group, and end the group after `limit` seconds.

    `packages` are folders that the job imports from before the installed packages.
    """
    paths = [*map(str, (*packages, checkout)), *filter(None, [environment.get("PYTHONPATH")])]
    # Unbuffered: the last lines of a failed job are those that it has written last, on either stream.
    variables = {**environment, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    if job.interpreted and job.options.get("device") == "cpu":
        variables["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "benchmarks.gpu_session.measure", json.dumps(asdict(job))]
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, str(result)], cwd=checkout, env=variables, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_group(process)
        output = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        record: dict[str, Any] = {"status": "done"}
        if result.exists():
            record["result"] = json.loads(result.read_text(encoding="utf-8"))
        if code is None:
            record["status"], record["error"] = "timed out", [f"stopped after {limit:.0f} s"]
        elif code or "result" not in record:
            record["status"], record["error"] = "failed", [f"exit code {code}"]
        if record["status"] != "done":
            record["error"] += output[-_LINES_OF_ERRORS:]
        return record


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started: ranks and reading processes."""
    with suppress(ProcessLookupError):  # All have ended.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
