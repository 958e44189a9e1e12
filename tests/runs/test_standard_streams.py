"""Runs whose messages and summary cannot be printed."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.command import environment

_SHORT = ("--set", "train.max_steps=2", "--set", "data.workers=0")


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["full", "pipe", "closed"])
def test_a_run_ends_well_though_nobody_can_read_what_it_prints(describe, tmp_path, broken):
    command = ["train", "--config", describe(), "--run-dir", tmp_path / "run", *_SHORT]
    reader, stream = os.pipe() if broken == "pipe" else (None, os.open("/dev/full", os.O_WRONLY))
    if reader is not None:
        os.close(reader)

    def close():
        if broken == "closed":
            os.closerange(0, 3)

    done = subprocess.run(
        [sys.executable, "-m", "facetrain", *map(str, command)],
        env=environment(), stdout=stream, stderr=stream, preexec_fn=close,
    )  # fmt: skip
    os.close(stream)
    assert done.returncode == 0
    assert json.loads((tmp_path / "run" / "state.json").read_text())["state"] == "finished"
    log = (tmp_path / "run" / "log.txt").read_text()
    assert ("the summary is not printed" in log) == (broken != "closed")
