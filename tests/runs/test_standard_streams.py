"""Runs whose messages and summary cannot be printed."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.command import environment, start

_SHORT = ("--set", "train.max_steps=2", "--set", "data.workers=0")


def unread_pipe():
    """Return a file whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["full", "pipe", "closed"])
def test_a_run_ends_well_though_nobody_can_read_what_it_prints(describe, tmp_path, broken):
    command = ["train", "--config", describe(), "--run-dir", tmp_path / "run", *_SHORT]
    if broken == "closed":  # Python itself starts otherwise without its streams
        words = [sys.executable, "-m", "facetrain", *map(str, command)]
        code = subprocess.run(words, env=environment(), preexec_fn=lambda: os.closerange(0, 3)).returncode
    else:
        with open("/dev/full", "w") if broken == "full" else unread_pipe() as output:
            code = start(*command, output=output).wait(120)
    assert code == 0
    assert json.loads((tmp_path / "run" / "state.json").read_text())["state"] == "finished"
    log = (tmp_path / "run" / "log.txt").read_text()
    assert ("the summary is not printed" in log) == (broken != "closed")
