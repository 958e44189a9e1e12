"""Calls of the command line, in a new process as a user does, or in this one."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO, Any

import torch

from facetrain.cli.app import app
from facetrain.errors import FacetrainError
from tests.support.forks import become, customize, fork_ranks
from tests.support.processes import descendants, kill
from tests.support.ranks import PRELOADED

_started: list[subprocess.Popen | ForkedCommand] = []
ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 800
TORCHRUN = "torch.distributed.run"
"""Module of torchrun."""
FOR_ADDRESSES = {"fsspec", "s3fs", "gcsfs", "huggingface_hub", "aiohttp", "botocore"}
"""Packages that only commands with an address import."""
# The last three choose the instructions of the CPU: a process must compute the same bits as the test.
_INHERITED = (
    "PATH", "HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV",
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

    The process is forked from one that has imported torch and done nothing else, and its ranks are forked from it,
    which saves seconds each. With `fresh`, they are new ones as a user starts them.
    """
    command = [sys.executable, "-m", "facetrain", *map(str, arguments)]
    given = environment(**variables or {})
    if fresh:
        return subprocess.run(command, env=given, cwd=cwd, capture_output=True, text=True, timeout=_LIMIT_S)
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("stdout", "stderr"))
        with out.open("w") as to_out, err.open("w") as to_err:
            process = _fork_command(command[2:], given, cwd, (to_out, to_err))
        process.join()
        return subprocess.CompletedProcess(command, process.exitcode, out.read_text(), err.read_text())


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


def torchrun(processes: int, *arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command on several ranks under torchrun, which is forked as a command of `facetrain` is."""
    options = ("--standalone", "--nproc-per-node", processes, "-m", "facetrain", *arguments)
    process = start(*options, module=TORCHRUN, cwd=cwd)
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess([TORCHRUN, *map(str, options)], process.returncode, stdout, stderr)


def start(
    *arguments: object,
    module: str = "facetrain",
    cwd: Path | None = None,
    output: IO[str] | None = None,
    fresh: bool = False,
    new_session: bool = False,
    **variables: str,
) -> subprocess.Popen | ForkedCommand:
    """Start `python -m MODULE ARGUMENTS` with additional environment variables, and return the running process.

    Its outputs go to `output`, or to pipes that `communicate` reads. It is forked as in `facetrain`; what a test puts
    into a `sitecustomize.py` in PYTHONPATH is run. SIGINT and SIGHUP have their default actions even if the tests run
    in the background of a script or under nohup, which ignore them.
    """
    given = environment(**variables)
    process: subprocess.Popen | ForkedCommand
    if fresh:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)], env=given, text=True,
            cwd=cwd, stdout=output or subprocess.PIPE, stderr=output or subprocess.PIPE, preexec_fn=restore_signals,
            start_new_session=new_session,
        )  # fmt: skip
    else:
        command = [module, *map(str, arguments)]
        process = ForkedCommand(command, given, cwd, output, new_session=new_session)
    _started.append(process)
    return process


def kill_started() -> None:
    """Kill the commands of `start` that still run, with their processes."""
    for process in _started:
        if process.poll() is None:
            kill([process.pid, *descendants(process.pid)])
            process.communicate(timeout=60) if process.stdout else process.wait(60)
    _started.clear()


class ForkedCommand:
    """A command in a forked process, with those methods of `subprocess.Popen` that tests call."""

    def __init__(
        self,
        command: list[str],
        variables: dict[str, str],
        cwd: Path | None,
        output: IO[str] | None,
        *,
        new_session: bool,
    ) -> None:
        with ExitStack() as writers:
            readers = []
            outputs = [output, output] if output else []
            while len(outputs) < 2:
                reader, writer = os.pipe()
                readers.append(os.fdopen(reader))
                outputs.append(writers.enter_context(os.fdopen(writer, "w")))
            self._process = _fork_command(command, variables, cwd, outputs, new_session=new_session)
        self.stdout, self.stderr = readers or (None, None)
        self.pid: int = self._process.pid
        self._texts: list[Future[str]] = []

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("facetrain", timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> list[str]:
        if not self._texts:
            pool = ThreadPoolExecutor(2)
            self._texts = [pool.submit(_read, stream) for stream in (self.stdout, self.stderr)]
            pool.shutdown(wait=False)
        texts = [text.result(timeout) for text in self._texts]
        self.wait(timeout)
        return texts

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _read(stream: IO[str]) -> str:
    with stream:
        return stream.read()


def restore_signals() -> None:
    """Give SIGINT and SIGHUP their default actions, in a new process."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _fork_command(
    command: list[str],
    variables: dict[str, str],
    folder: Path | None,
    outputs: Sequence[IO[str]],
    *,
    new_session: bool = False,
) -> ForkServerProcess:
    """Start a module with arguments in a process that is forked from one with tests.support.preloaded."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    ends = [Connection(os.dup(output.fileno()), readable=False) for output in outputs]
    process = context.Process(
        target=_become_command, args=(command, variables, folder or Path.cwd(), ends, new_session)
    )
    process.start()
    for end in ends:
        end.close()
    return process


def _become_command(
    command: list[str],
    variables: dict[str, str],
    folder: Path,
    outputs: Sequence[Connection],
    new_session: bool,
) -> None:
    """Run the command line in this process as if it were a new one."""
    signal.alarm(_LIMIT_S)
    if new_session:
        os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), number)
        output.close()
    # New ones: those of the fork server have found out whether one can seek in its outputs.
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.path[:0] = [str(folder), *variables["PYTHONPATH"].split(os.pathsep)]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    customize()
    fork_ranks()
    module, *arguments = command
    become(module, arguments)
