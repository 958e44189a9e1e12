"""A few kills of some settings; all of them are `make soak`."""

import subprocess
import sys

import pytest

from tests.support.command import environment


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "kills"),
    [
        ("accumulation, sampling", 10),
        ("2 ranks, fp16, sampling", 10),
        # Each start imports torch three times: ten kills take half of the time limit on an idle machine.
        ("command, 2 ranks", 4),
    ],
)
def test_a_run_that_is_killed_at_random_moments_equals_one_that_was_not_killed(setting, kills):
    command = [sys.executable, "-m", "tests.soak.kills", "--kills", str(kills), "--only", setting]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| all | {kills} |" in done.stdout
