"""A few kills of some settings; all of them are `make soak`."""

import subprocess
import sys

import pytest

from tests.support.command import environment

KILLS = 10


@pytest.mark.long
@pytest.mark.parametrize("setting", ["accumulation, sampling", "2 ranks, fp16, sampling", "command, 2 ranks"])
def test_a_run_that_is_killed_at_random_moments_equals_one_that_was_not_killed(setting):
    command = [sys.executable, "-m", "tests.soak.kills", "--kills", str(KILLS), "--only", setting]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| all | {KILLS} |" in done.stdout
