"""Server that forks a process for each call of the command line, so that none of them has to import torch.

Run as a program. Each line on standard input is a call in JSON; the answer is the exit code of its process.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading

_PRELOADED = ["facetrain.cli.app", "facetrain.run.training", "facetrain.verify.evaluate", "torch._dynamo"]
"""Modules that most commands use; optimizers import the last. Importing them takes four seconds."""
_LIMIT_S = 300


def _serve() -> None:
    """Answer calls until the tests have ended; return in the process of each call."""
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # the collector of a forked process would write to all pages, and so copy them
    for line in sys.stdin:
        process = os.fork()
        if not process:
            return _become(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    sys.exit()


def _become(arguments: list[str], environment: dict[str, str], folder: str, files: list[str]) -> None:
    """Turn this process into a new one of the command line, whose standard streams are files."""
    for number, (file, flags) in enumerate(zip(files, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)):
        os.dup2(os.open(file, flags | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = folder
    sys.argv[1:] = arguments
    signal.alarm(_LIMIT_S)


def _run() -> None:
    """Run the command, and end as Python does, but without freeing all modules: that takes more than a second."""
    try:
        runpy.run_module("facetrain", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code or 0)


if __name__ == "__main__":
    _serve()
    _run()
