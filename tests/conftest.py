"""The longest tests first, and torch's random numbers the same in every run."""

import sys
from pathlib import Path

import pytest

RUNS = Path(__file__).parent / "runs"


def pytest_collection_modifyitems(items):
    # With several workers (`pytest -n`) the short ones then fill the end evenly.
    items.sort(key=lambda item: RUNS not in item.path.parents)


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws depends neither on the moment nor on the tests before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
