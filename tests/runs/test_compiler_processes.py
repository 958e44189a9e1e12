"""Processes of torch's compiler that are killed or stopped while a run waits for them."""

import re
import signal

import pytest

from tests.support.command import start
from tests.support.processes import descendants, kill

COMPILER = """#!/bin/sh
case "$*" in *.cpp*) echo $$ >> "$0.pids"; kill -{signal} $$;; esac
exec g++ "$@"
"""


@pytest.fixture
def train_with(describe, tmp_path):
    """Run a compiled training whose compiler gets a signal; return the finished command."""

    def train(number):
        compiler = tmp_path / "compiler"
        compiler.write_text(COMPILER.format(signal=number.name.removeprefix("SIG")))
        compiler.chmod(0o755)
        process = start(
            "train", "--config", describe(), "--run-dir", tmp_path / "run",
            "--set", "train.compile=on", "--set", "train.timeout_s=5",
            fresh=True, CXX=str(compiler), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "code"),
        )  # fmt: skip
        try:
            _, stderr = process.communicate(timeout=240)
        finally:
            kill([process.pid, *descendants(process.pid)])
        return process, stderr

    pids = tmp_path / "compiler.pids"
    pids.touch()
    yield train
    kill(map(int, pids.read_text().split()))  # a stopped one waits for ever


@pytest.mark.long
def test_a_run_whose_compiler_is_killed_ends_and_says_what_to_do(train_with):
    process, stderr = train_with(signal.SIGKILL)
    assert process.returncode == 1, stderr
    assert re.search("error: train.compile: the compiler failed on .*; .* set train.compile to off", stderr)


@pytest.mark.long
def test_a_run_whose_compiler_is_stopped_ends_and_names_it(train_with):
    process, stderr = train_with(signal.SIGSTOP)
    assert process.returncode == 1, stderr
    waits = r"error: process \d+ waits for process \d+ \(/bin/sh \S+/compiler .*\), .* was stopped \(SIGSTOP\) 5 s ago"
    assert re.search(waits, stderr), stderr
