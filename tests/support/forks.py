"""Processes that are forked from one that has imported torch, in place of new ones, whose imports take seconds."""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


def become(module: str, arguments: list[str]) -> NoReturn:
    """Run `python -m MODULE ARGUMENTS` in this process, and end it.

    It ends as Python does, but without freeing all modules: that takes more than a second.
    """
    sys.argv[1:] = arguments
    sys.modules.pop(module, None)  # one that was imported already would be run with a warning
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)  # type: ignore[arg-type]


def customize() -> None:
    """Run a `sitecustomize.py` that is in `sys.path`, as Python does when it starts."""
    sys.modules.pop("sitecustomize", None)
    with suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")


def fork_ranks() -> None:
    """Let torch's elastic agent in this process fork its ranks.

    Not beside a GPU: after a fork, CUDA refuses a process whose parent has counted the GPUs.
    """
    if not Path("/dev/nvidiactl").exists():
        SubprocessHandler._popen = _fork  # type: ignore[method-assign]


class _Fork:
    """A forked process with those methods of `subprocess.Popen` that an elastic agent calls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.01)


def _fork(handler: SubprocessHandler, command: tuple[str, ...], variables: dict[str, str]) -> _Fork:
    """Replace `SubprocessHandler._popen`: what a new process would not have from its parent, the fork drops."""
    python, *options = command
    module, *arguments = options[options.index("-m") + 1 :]
    assert python == sys.executable and handler._stdout is handler._stderr is None
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return _Fork(pid)
    os.setsid()
    atexit._clear()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
    for end in map(int, os.listdir("/proc/self/fd")):
        if end > 2 and end != tracker:
            with suppress(OSError):  # that of the listing is closed
                os.close(end)
    os.environ.clear()
    os.environ.update(variables)
    Path("/proc/self/comm").write_text(f"rank-{variables['RANK']}")  # for `ranks_of`
    customize()  # its signal handlers
    become(module, arguments)
