"""Calls of the command line, in a new process as a user does, or in this one."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
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


def facetrain(
    *arguments: object, cwd: Path | None = None, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `facetrain ARGUMENTS` in a process of its own and wait for its end.

    The process is forked from one that has imported torch and done nothing else, which saves seconds. With `fresh`,
    it is a new one as a user starts it.
    """
    command = [sys.executable, "-m", "facetrain", *map(str, arguments)]
    if fresh:
        return subprocess.run(
            command, env=environment(), cwd=cwd, capture_output=True, text=True, timeout=300
        )
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        call = {"arguments": command[3:], "environment": environment(), "folder": str(cwd or Path.cwd())}
        server = _server()
        print(json.dumps(call | {"files": [os.devnull, *map(str, outputs)]}), file=server.stdin, flush=True)
        exit_code = int(server.stdout.readline())
        return subprocess.CompletedProcess(command, exit_code, *(path.read_text() for path in outputs))


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the server of forked processes, which ends with this process."""
    command = [sys.executable, "-m", "tests.support.command_server"]
    return subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


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
        preexec_fn=restore_signals,
    )  # fmt: skip


def restore_signals() -> None:
    """Give SIGINT and SIGHUP their default actions, in a new process."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
