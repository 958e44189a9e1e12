"""Runs that are killed at random moments and resumed, compared bit for bit with a run that was not killed."""

import subprocess
import sys

import pytest

from facetrain.checkpoint.load import Checkpoint
from tests.runs.test_training import metrics
from tests.support.command import environment

KILLS = 10
OPTIONS = [
    {"sample_rate": 0.3, "accumulate": 2, "dropout": 0.2},
    {"sample_rate": 0.3, "precision": "fp16", "checkpoint": "every_steps: 2, keep: 2"},
]


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS)
def test_a_run_killed_at_ten_random_moments_equals_one_that_was_not_killed(describe, tmp_path, options):
    config = describe(**({"steps": 16, "checkpoint": "every_steps: 3, keep: 2"} | options))
    command = [
        sys.executable,
        "-m",
        "tests.support.kill_points",
        config,
        tmp_path,
        KILLS,
        OPTIONS.index(options),
    ]
    done = subprocess.run(
        list(map(str, command)), env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == KILLS and len(set(done.stdout.split())) > 1, done.stdout
    whole = Checkpoint.open(tmp_path / "whole")
    for folder in tmp_path.glob("killed_*"):
        assert metrics(folder) == metrics(tmp_path / "whole")
        killed = Checkpoint.open(folder)
        killed.verify()
        for file, expected in zip(killed.manifest.files, whole.manifest.files, strict=True):
            assert file.sha256 == expected.sha256, file.name
