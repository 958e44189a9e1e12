"""Calls of the command line, in a new process as a user does, or in this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from facetrain.cli.app import app
from facetrain.errors import FacetrainError

ROOT = Path(__file__).resolve().parents[2]
_INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


def environment(**extra: str) -> dict[str, str]:
    """Return a clean environment with one thread per process: results do not depend on the machine."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    # A GPU session passes packages in PYTHONPATH that are not installed on its machine.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | extra


def facetrain(*arguments: object, **options) -> subprocess.CompletedProcess:
    """Run `facetrain ARGUMENTS` in a new process and wait for its end."""
    command = [sys.executable, "-m", "facetrain", *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, **options)


def refusal(*arguments: object) -> FacetrainError:
    """Return the error that `facetrain ARGUMENTS` ends with. Runs in this process, which saves seconds."""
    try:
        app([*map(str, arguments)])
    except FacetrainError as error:
        return error
    except SystemExit as ended:
        raise AssertionError(f"ended with {ended.code}") from ended
    raise AssertionError("ended without an error")


def torchrun(processes: int, *arguments: object) -> subprocess.CompletedProcess:
    """Run the command on several ranks under torchrun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    command += ["-m", "facetrain", *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)


def start(*arguments: object, **variables: str) -> subprocess.Popen:
    """Start `facetrain ARGUMENTS` with additional environment variables, and return the running process.

    SIGINT and SIGHUP have their default actions even if the tests run in the background of a script or under nohup,
    which ignore them.
    """
    command = [sys.executable, "-m", "facetrain", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=_restore_signals,
    )  # fmt: skip


def _restore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
