"""Calls of the command line, in a new process as a user does, or in this one."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from facetrain.cli.app import app
from facetrain.errors import FacetrainError
from tests.support.ranks import PRELOADED

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 300
FOR_ADDRESSES = {"fsspec", "s3fs", "gcsfs", "huggingface_hub", "aiohttp", "botocore"}
"""Packages that only commands with an address import."""
# The last three choose the instructions of the CPU: a process must compute the same bits as the test.
_INHERITED = (
    "PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV",
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS",
)  # fmt: skip


def environment(**extra: str) -> dict[str, str]:
    """Return a clean environment with one thread per process: results do not depend on the machine."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    # A GPU session passes packages in PYTHONPATH that are not installed on its machine.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | extra


def facetrain(
    *arguments: object,
    cwd: Path | None = None,
    fresh: bool = False,
    variables: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `facetrain ARGUMENTS` in a process of its own, with more environment variables, and wait for its end.

    The process is forked from one that has imported torch and done nothing else, which saves seconds. With `fresh`,
    it is a new one as a user starts it.
    """
    command = [sys.executable, "-m", "facetrain", *map(str, arguments)]
    given = environment(**variables or {})
    if fresh:
        return subprocess.run(command, env=given, cwd=cwd, capture_output=True, text=True, timeout=_LIMIT_S)
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        arguments_of = (command[3:], given, cwd or Path.cwd(), outputs)
        process = multiprocessing.get_context("forkserver").Process(target=_become_command, args=arguments_of)
        process.start()
        process.join()
        return subprocess.CompletedProcess(command, process.exitcode, *(path.read_text() for path in outputs))


def _become_command(
    arguments: list[str], variables: dict[str, str], folder: Path, outputs: Sequence[Path]
) -> None:
    """Run the command line in this process as if it were a new one, whose output goes to files.

    End as Python does, but without freeing all modules: that takes more than a second.
    """
    signal.alarm(_LIMIT_S)
    for number, path in enumerate((Path(os.devnull), *outputs)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv[1:] = arguments
    code: object = 0
    try:
        runpy.run_module("facetrain", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)  # type: ignore[arg-type]


def output_of(*arguments: object, **options: Any) -> str:
    """Run `facetrain ARGUMENTS`, which must succeed, and return what it prints."""
    process = facetrain(*arguments, **options)
    assert process.returncode == 0, process.stderr
    return str(process.stdout)


def refusal(*arguments: object) -> FacetrainError:
    """Return the error that `facetrain ARGUMENTS` ends with. Runs in this process, which saves seconds."""
    try:
        app([*map(str, arguments)])
    except FacetrainError as error:
        return error
    except SystemExit as ended:
        raise AssertionError(f"ended with {ended.code}") from ended
    raise AssertionError("ended without an error")


def printed_by(module: str, *arguments: str, **variables: str) -> Any:
    """Run a program of tests.support with additional environment variables; return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}", *arguments],
        env=environment(**variables), cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
