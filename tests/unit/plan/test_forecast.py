import json
import subprocess
import sys

import pytest

from tests.support.command import ROOT, environment
from tests.support.measure_memory import EXACT


def measure(backbone, precision, batch, classes):
    """Train two steps in a new process; return the forecast divided by its peak of memory."""
    values = {"model": {"backbone": backbone}, "train": {"precision": precision, "batch_size": batch}}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.measure_memory", json.dumps(values), str(classes)],
        cwd=ROOT, env=environment(**EXACT), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["forecast"] / found["measured"]


def train(values, classes, ranks=1):
    """Run `facetrain train`; return the forecast divided by the largest peak of memory of its processes."""
    words = [json.dumps(values), str(classes), str(ranks)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.train_for_memory", *words],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["forecast"] / found["measured"]


# The memory of torch itself differs by some 40 MB between releases, and by 100 MB between machines of one kind.
NEAR = 0.1
NET = {"backbone": "iresnet", "layers": [1] * 4, "widths": [64, 64, 128, 256], "embedding_size": 256}


@pytest.mark.slow
def test_the_memory_of_a_whole_run_is_as_forecast():
    values = {"model": NET, "train": {"batch_size": 24, "precision": "bf16"}, "eval": {"batch_size": 16}}
    assert train(values, 400) == pytest.approx(1, abs=NEAR)


LONG = pytest.mark.long


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision", "batch", "verified", "ranks"),
    [
        pytest.param(NET, "bf16", 8, 128, 1, marks=LONG),  # verification needs more than a step
        pytest.param(NET, "fp32", 16, 16, 2, marks=LONG),
        pytest.param({"backbone": "r18"}, "bf16", 32, 16, 1, marks=LONG),
        pytest.param({"backbone": "mbf"}, "fp32", 32, 64, 1, marks=LONG),
        pytest.param({"backbone": "r50"}, "bf16", 16, 64, 1, marks=LONG),
    ],
)
def test_the_memory_of_other_networks_batches_and_ranks_is_as_forecast(
    model, precision, batch, verified, ranks
):
    values = {"model": model, "train": {"batch_size": batch, "precision": precision}}
    assert train(values | {"eval": {"batch_size": verified}}, 400, ranks) == pytest.approx(1, abs=NEAR)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "precision", "batch", "classes"),
    [
        ("r18", "bf16", 32, 50_000),
        ("mbf", "fp32", 32, 10_000),
        pytest.param("r18", "fp32", 16, 200_000, marks=LONG),
        pytest.param("r50", "fp32", 8, 10_000, marks=LONG),
        pytest.param("r50", "bf16", 16, 10_000, marks=LONG),
        pytest.param("mbf", "bf16", 16, 20_000, marks=LONG),
    ],
)
def test_the_memory_of_training_steps_is_as_forecast(backbone, precision, batch, classes):
    assert measure(backbone, precision, batch, classes) == pytest.approx(1, abs=0.05)
