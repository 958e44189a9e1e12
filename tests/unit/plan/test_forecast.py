import json
import subprocess
import sys

import pytest

from tests.support.command import ROOT, environment


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "batch"), [(50_000, 32), (200_000, 16)])
def test_the_forecast_is_within_five_percent_of_the_memory_that_training_needs(classes, batch):
    # Freed memory goes back to the system at once, so that the peak is of what is in use.
    exact = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.measure_memory", str(classes), str(batch)],
        cwd=ROOT, env=environment(**exact), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["forecast"] == pytest.approx(found["measured"], rel=0.05)
