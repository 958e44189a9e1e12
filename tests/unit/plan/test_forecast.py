import json
import subprocess
import sys

import pytest

from tests.support.command import ROOT, environment
from tests.support.measure_memory import EXACT


def measure(backbone, precision, batch, classes):
    """Train in a process of its own; return its peak of memory over the forecast."""
    values = {"model": {"backbone": backbone}, "train": {"precision": precision, "batch_size": batch}}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.measure_memory", json.dumps(values), str(classes)],
        cwd=ROOT, env=environment(**EXACT), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["forecast"] / found["measured"]


def test_the_forecast_is_within_five_percent_of_the_memory_that_training_needs():
    assert measure("mbf", "bf16", 16, 20_000) == pytest.approx(1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "precision", "batch", "classes"),
    [
        ("r18", "fp32", 16, 200_000),
        ("r18", "bf16", 32, 50_000),
        ("r50", "fp32", 8, 10_000),
        ("r50", "bf16", 16, 10_000),
        ("mbf", "fp32", 32, 10_000),
    ],
)
def test_so_is_that_of_other_networks_batches_and_precisions(backbone, precision, batch, classes):
    assert measure(backbone, precision, batch, classes) == pytest.approx(1, abs=0.05)
