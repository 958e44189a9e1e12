"""Starts of runs in forked processes, and their faults.

The program imports torch and facetrain once and forks the ranks of every start, so that a start takes about a second
instead of eight.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import matplotlib.pyplot  # noqa: F401 (imported before the forks, as the next two)
import onnx  # noqa: F401
import torch
import torch._dynamo

from facetrain.checkpoint.commit import complete_steps
from facetrain.config.loading import load_config
from facetrain.errors import FacetrainError
from tests.soak.settings import Setting, write_config
from tests.support import training
from tests.support.command import environment
from tests.support.processes import descendants, kill, wait_until_gone
from tests.support.ranks import free_ports

REFUSED, FAILED = 2, 99
"""Exit codes: of facetrain for an error that it expects, and here for any other exception."""
_FINISHES_WITHIN_S = 300
_GONE_WITHIN_S = 60


class RunFailed(Exception):
    """A run has failed without a kill; the message is the end of its output."""


def prepare_forks() -> None:
    """Use one thread from now on: threads do not survive a fork."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


def fork(call: Callable[[], int], output: Path) -> int:
    """Call a function in a new process that appends to a file; return the process id. Its exit code is the result."""
    child = os.fork()
    if child:
        return child
    code = FAILED
    try:
        file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = call()
    except FacetrainError as error:
        print(f"error: {error}", file=sys.stderr)
        code = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Starter:
    """Starts the runs of one setting in one folder, and kills them."""

    def __init__(self, setting: Setting, folder: Path, data: Path, rng: random.Random) -> None:
        self.setting, self._rng = setting, rng
        self.disk, self.whole = folder / "disk", folder / "whole"
        self.disk.mkdir(parents=True)
        self._config = write_config(setting, data, folder / "run.yaml")
        self._output = folder / "output"

    @property
    def output(self) -> str:
        """Return the output of the last start."""
        return self._output.read_text(errors="replace")

    def train_whole(self) -> float:
        """Train the undisturbed run; return its seconds."""
        since = time.monotonic()
        self.train(self.whole, self.setting.ranks[0])
        return time.monotonic() - since

    def train(self, run_dir: Path, ranks: int = 0, is_due: Callable[[], bool] = lambda: False) -> bool:
        """Start or resume a run, and kill it when it is due; return whether it was killed before its end.

        Raises:
            RunFailed: it failed without a kill, or it does not end, or processes are left.
        """
        self._output.write_bytes(b"")
        running = self._start(run_dir, ranks or self._rng.choice(self.setting.ranks))
        deadline, codes = time.monotonic() + _FINISHES_WITHIN_S, set[int]()
        while running:
            if is_due():
                self._kill(running)
                return True
            time.sleep(0.002)
            for child in list(running):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    running.remove(child)
                    codes.add(os.waitstatus_to_exitcode(status))
            if any(codes) or time.monotonic() > deadline:
                end_all()
                raise RunFailed(f"the run did not end, or failed ({codes}): {self.output[-2000:]}")
        return False

    def _start(self, run_dir: Path, ranks: int) -> list[int]:
        """Fork the ranks, or the command that starts them; return the process ids."""
        if self.setting.is_command:
            return [fork(lambda: self._become_command(run_dir, ranks), self._output)]
        (port,) = free_ports(1)
        return [
            fork(lambda rank=rank: self._run_rank(run_dir, rank, ranks, port), self._output)  # type: ignore[misc]
            for rank in range(ranks)
        ]

    def _run_rank(self, run_dir: Path, rank: int, ranks: int, port: int) -> int:
        if ranks > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
            )  # fmt: skip
        if complete_steps(run_dir / "checkpoints"):
            return training.go_on(run_dir)
        return training.train(load_config(self._config), run_dir)

    def _become_command(self, run_dir: Path, ranks: int) -> int:
        if complete_steps(run_dir / "checkpoints"):
            command = ["resume", run_dir]
        else:
            command = ["train", "--config", self._config, "--run-dir", run_dir]
        words = [sys.executable, "-m", "facetrain", *map(str, command), "--nproc-per-node", str(ranks)]
        os.execve(sys.executable, words, environment())

    def _kill(self, started: list[int]) -> None:
        """Kill all processes of the run; of a command also one alone. The others must then end by themselves."""
        running = [pid for child in started for pid in (child, *descendants(child))]
        victims = running
        if self.setting.is_command:
            single = [pid for pid in running if not _is_resource_tracker(pid)]
            victims = self._rng.choice([running, started, [self._rng.choice(single)]])
        kill(victims)
        left = wait_until_gone({*running, *descendants(os.getpid())}, _GONE_WITHIN_S)
        described = [_describe(pid) for pid in left]
        end_all()
        if left:
            raise RunFailed(
                f"{victims} of {running} were killed, and {described} still ran: {self.output[-2000:]}"
            )


def _describe(pid: int) -> str:
    """Return the command, the state and the kernel's wait of a process."""
    with suppress(OSError):
        place = Path(f"/proc/{pid}")
        words = place.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        state = re.search(r"State:\s*(.*)", place.joinpath("status").read_text())
        return f"{pid} {words} {state and state[1]} {place.joinpath('wchan').read_text()}"
    return str(pid)


def end_all() -> None:
    """Kill all that this process has started, and wait for its end."""
    kill(descendants(os.getpid()))
    with suppress(ChildProcessError):
        while True:
            os.wait()


def remove_run(run: Path) -> None:
    """Remove a run folder, or the link at its place."""
    if run.is_symlink():
        run.unlink()
    shutil.rmtree(run, ignore_errors=True)


def _is_resource_tracker(pid: int) -> bool:
    """Return whether a process is multiprocessing's resource tracker: a run goes on without it."""
    with suppress(OSError):  # the process has ended in the meantime
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
