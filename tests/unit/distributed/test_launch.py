import signal
import subprocess
import sys
import time

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from facetrain.distributed.elastic_agent import _handle_signals
from facetrain.distributed.grace_period import export_grace_period, grace_s
from tests.support.command import environment

HANG_UP = """
import signal, sys
from facetrain.cli.launch_options import LaunchOptions, start

def train():
    signal.raise_signal(signal.SIGHUP)
    return 0

signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
start(train, [], LaunchOptions(), lambda: "cpu")
"""
RANK = """
import os, signal, sys
from facetrain.cli import rank
from facetrain.run import train
from facetrain.run.request import TrainRequest

setattr(train, sys.argv[1], lambda *_: os.kill(os.getpid(), signal.SIGHUP))
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.argv = ["rank", TrainRequest(command="train").model_dump_json()]
rank.main()
"""


@pytest.mark.parametrize(("call", "code"), [("assemble", -signal.SIGHUP), ("agree", 129)])
def test_a_signal_ends_a_rank_at_once_until_it_has_met_the_others_and_then_so_that_it_leaves_no_lock(
    call, code
):
    ended = subprocess.run([sys.executable, "-c", RANK, call], env=environment())
    assert ended.returncode == code


def test_a_signal_ends_a_rank_of_torchrun_before_it_has_met_the_others_also_as_first_of_a_container():
    by_torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for before, code in (("", -signal.SIGHUP), ("import os; os.getpid = lambda: 1", 129)):
        script = [sys.executable, "-c", f"{before}\n{HANG_UP}", "SIG_DFL"]
        assert subprocess.run(script, env=environment() | by_torchrun).returncode == code


def test_a_rank_imports_little_before_a_signal_ends_it_without_a_traceback():
    script = (
        "import sys; before = set(sys.modules); import facetrain.cli.rank; print(*set(sys.modules) - before)"
    )
    imported = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True
    )
    assert "facetrain.cli.rank" in imported.stdout and "pydantic" not in imported.stdout


@pytest.mark.parametrize(("action", "code"), [("SIG_DFL", 129), ("SIG_IGN", 0)])
def test_a_process_survives_the_end_of_its_terminal_only_under_nohup(action, code):
    ended = subprocess.run([sys.executable, "-c", HANG_UP, action], env=environment())
    assert ended.returncode == code


@pytest.mark.parametrize("action", [signal.SIG_DFL, signal.SIG_IGN])
def test_an_agent_handles_the_end_of_its_terminal_unless_it_runs_under_nohup(action, tmp_path):
    numbers = [signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
    for number in numbers:
        signal.signal(number, action)
    _handle_signals(tmp_path)
    handled = [signal.getsignal(number) != action for number in numbers]
    assert handled == [action == signal.SIG_DFL, True, True, True]


def test_a_signal_that_python_drops_in_a_finalizer_of_the_agent_comes_again(tmp_path, monkeypatch):
    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # restored at the end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _handle_signals(tmp_path)
    try:
        Finalized()
        with pytest.raises(SignalException):
            time.sleep(60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({}, 300),
        ({"TORCHELASTIC_RUN_ID": "run"}, 30),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "20", "TORCHELASTIC_RUN_ID": "run"}, 20),
    ],
    ids=["no agent", "torchrun", "exported"],
)
def test_a_run_has_300_s_to_save_unless_torchrun_ends_it_earlier(given, seconds, monkeypatch):
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert grace_s() == seconds


def test_the_ranks_of_an_agent_have_the_grace_period_of_their_launcher(monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")  # so that it is restored
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    export_grace_period()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert grace_s() == 300
