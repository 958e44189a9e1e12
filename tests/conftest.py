"""The longest tests first: with several workers (`pytest -n`) the short ones then fill the end evenly."""

from pathlib import Path

RUNS = Path(__file__).parent / "runs"


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: RUNS not in item.path.parents)
