"""A short run of every fuzz target; long ones are `python -m tests.fuzz.run TARGET`."""

import pytest

from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS, seeds


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_input_raises_nothing_but_the_documented_error(name):
    fuzz(TARGETS[name], seeds()[name], executions=1500, seed=1)
