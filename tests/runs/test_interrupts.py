"""Ctrl-C before a command has begun, after its end, and while reading processes start."""

import os
import signal
import subprocess
import sys

import pytest

from facetrain import signals
from tests.support.command import ROOT, environment, start
from tests.support.processes import descendants, kill, wait_until_gone
from tests.support.runs import LONG
from tests.support.waiting import wait_until

INTERRUPTED_IMPORT = """
import runpy, signal, sys

def drop_exceptions():
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        pass

class Finalized:
    def __del__(self):
        raise KeyboardInterrupt

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            {interrupt}

# The shell that runs the tests in the background ignores Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
runpy.run_module("facetrain", run_name="__main__")
"""


@pytest.mark.parametrize(
    "interrupt",
    ["raise KeyboardInterrupt", "Finalized()", "drop_exceptions()"],
)
def test_ctrl_c_during_the_imports_is_an_interruption_even_where_python_drops_exceptions(interrupt):
    program = INTERRUPTED_IMPORT.format(interrupt=interrupt)
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


INTERRUPTED_COMMAND = """
from facetrain.cli.app import end_with

def interrupt():
    raise KeyboardInterrupt

end_with(interrupt, debug=False)
"""


@pytest.mark.parametrize(
    "program",
    [INTERRUPTED_IMPORT.format(interrupt="raise KeyboardInterrupt"), INTERRUPTED_COMMAND],
    ids=["imports", "command"],
)
@pytest.mark.parametrize(("rank", "stderr"), [(0, "error: interrupted\n"), (1, "")])
def test_of_the_ranks_of_a_host_the_first_alone_reports_ctrl_c(program, rank, stderr):
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(LOCAL_RANK=str(rank)), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, stderr)


TERMINATED_IMPORT = """
import importlib, signal, sys
from facetrain.__main__ import run_program
from facetrain.signals import exit_on_signal

class Terminate:
    def find_spec(self, name, path=None, target=None):
        if name == "colorsys":
            try:
                signal.raise_signal(signal.SIGTERM)
            except BaseException:
                print("dropped", flush=True)

def run():
    signal.signal(signal.SIGTERM, exit_on_signal)
    sys.meta_path.insert(0, Terminate())
    import colorsys
    signal.pause()

run_program(run)
"""


def test_a_signal_during_an_import_ends_the_process_after_it():
    command = [sys.executable, "-c", TERMINATED_IMPORT]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "", "")


VALIDATED = """
import signal
from pydantic import TypeAdapter
from pydantic_core import core_schema
from facetrain.__main__ import run_program

class Interrupted:
    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException as error:
            raise ValueError("replaced") from error
        return core_schema.any_schema()

def run():
    TypeAdapter(Interrupted)
    signal.pause()

# The shell that runs the tests in the background ignores Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
run_program(run)
"""


COMPARED = """
import signal
import numpy as np
from facetrain.__main__ import run_program

class Title(str):
    def __eq__(self, other):
        signal.raise_signal(signal.SIGINT)
        return True

    __hash__ = str.__hash__

def run():
    one, other = (
        np.zeros(1, {"names": ["x"], "formats": [kind], "titles": [Title("t")]}) for kind in (np.int32, np.int64)
    )
    one == other
    signal.pause()

signal.signal(signal.SIGINT, signal.default_int_handler)
run_program(run)
"""


@pytest.mark.parametrize("program", [VALIDATED, COMPARED], ids=["pydantic", "NumPy"])
def test_ctrl_c_where_a_library_replaces_exceptions_comes_after_it(program):
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_a_signal_that_waits_is_sent_again_until_python_has_handled_it(monkeypatch):
    # The first alarm can come just before a wait in C, which then goes on: the next one ends it.
    monkeypatch.setattr(signals, "_SOON_S", 600)
    received = []
    signal.signal(signal.SIGUSR2, lambda *_: received.append(1))
    signals.raise_soon(signal.SIGUSR2)
    assert signal.getitimer(signal.ITIMER_REAL)[1] > 0
    signal.raise_signal(signal.SIGALRM)
    assert received == [1] and signal.getitimer(signal.ITIMER_REAL) == (0, 0)


SLOW_IMPORT = """
import signal, sys, time
import facetrain.signals as module
from facetrain.__main__ import run_program

module._LONGEST_S = 0.1

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "colorsys":
            signal.raise_signal(getattr(signal, sys.argv[1]))
            time.sleep(600)

def run():
    signal.signal(signal.SIGTERM, module.exit_on_signal)
    sys.meta_path.insert(0, Slow())
    import colorsys

# The shell that runs the tests in the background ignores Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
run_program(run)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_does_not_wait_for_an_import_without_end(name, code):
    command = [sys.executable, "-c", SLOW_IMPORT, name]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == code and "Traceback" not in done.stderr


TERMINATED = """
import signal, sys, time
from facetrain.__main__ import run_program

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

def run():
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    Finalized()
    time.sleep(60)

run_program(run)
"""


def test_a_signal_in_a_finalizer_in_which_python_drops_exceptions_ends_the_process():
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED], env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")


FAILED = """
import sys, time, types
from concurrent.futures import ThreadPoolExecutor

def fail():
    ThreadPoolExecutor(1).submit(time.sleep, 600)
    print("a report in the buffer")
    sys.exit(3)

sys.modules["facetrain.cli.app"] = types.SimpleNamespace(main=fail)
from facetrain.__main__ import main
main()
"""


def test_after_a_failure_the_exit_does_not_wait_for_the_threads_of_a_pool():
    done = subprocess.run(
        [sys.executable, "-c", FAILED], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "a report in the buffer\n", "")


INTERRUPTED_END = """
import atexit, signal, sys, time, types

class Finalized:
    def __del__(self, sleep=time.sleep):
        sleep(0.1)

late = Finalized()
end = lambda: atexit.register(signal.raise_signal, signal.SIGINT)
sys.modules["facetrain.cli.app"] = types.SimpleNamespace(main=end)
from facetrain.__main__ import main
main()
"""


def test_ctrl_c_while_python_ends_changes_nothing_for_a_command_that_is_done():
    command = [sys.executable, "-c", INTERRUPTED_END]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# A reading process says that it starts, and goes on when the test lets it.
HELD_READER = """
import os, pathlib, sys, time

if any("spawn_main" in argument for argument in sys.orig_argv):
    folder = pathlib.Path(__file__).parent
    (folder / f"starts.{os.getpid()}").touch()
    while not (folder / "go_on").exists():
        time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_ctrl_c_while_reading_processes_start_is_an_interruption_and_no_other_error(
    describe, tmp_path, ranks
):
    (tmp_path / "sitecustomize.py").write_text(HELD_READER)
    process = start(
        "train", "--config", describe(), "--run-dir", tmp_path / "run", *LONG, "--set", "data.workers=3",
        "--nproc-per-node", ranks, new_session=True, PYTHONPATH=f"{tmp_path}:{ROOT}",
    )  # fmt: skip
    wait_until(lambda: any(tmp_path.glob("starts.*")), process)
    pids = [process.pid, *descendants(process.pid)]
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    (tmp_path / "go_on").touch()
    try:
        _, stderr = process.communicate(timeout=120)
        errors = [line for line in stderr.splitlines() if line.startswith("error:")]
        assert process.returncode == 130 and "Traceback" not in stderr, stderr
        assert errors in ([], ["error: interrupted"]), stderr
        assert wait_until_gone(pids) == []
    finally:
        kill(pids)
