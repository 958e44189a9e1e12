"""Standard output and standard error that are full, broken or closed."""

import io
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from facetrain.cli.standard_streams import prepare_standard_streams
from tests.support.command import environment


def run(*arguments, variables=None, **streams):
    command = [sys.executable, "-m", "facetrain", *map(str, arguments)]
    return subprocess.run(command, env=environment(**variables or {}), text=True, timeout=300, **streams)


@contextmanager
def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


@pytest.mark.parametrize("variables", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
def test_a_result_for_a_full_disk_is_an_error_of_one_line(variables):
    with open("/dev/full", "w") as full:
        done = run("config", "list", variables=variables, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == "error: standard output: No space left on device; the result is not complete\n"


def test_a_command_whose_reader_has_ended_says_nothing():
    with broken_pipe() as pipe:
        done = run("config", "list", stdout=pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_stream_changes_nothing_else(closed):
    done = run("config", "list", stdout=subprocess.PIPE, preexec_fn=lambda: os.close(closed))
    assert done.returncode == 0
    assert ("glint360k_r50" in done.stdout) == (closed != 1)


def test_an_error_that_cannot_be_printed_keeps_its_exit_code():
    with open("/dev/full", "w") as full:
        assert run("config", "show", "none.yaml", stdout=full, stderr=full).returncode == 2


def test_streams_that_a_calling_program_has_replaced_stay(monkeypatch):
    own = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", own)
    monkeypatch.setattr(sys, "stderr", own)
    prepare_standard_streams()
    assert sys.stdout is own and sys.stderr is own
