"""A short run of every fuzz target; long ones are `make fuzz`."""

import pytest

from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS, seeds

SLOW = {"config": 150, "peer_config": 300, "mixture": 200}


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_input_raises_nothing_but_the_documented_error(name):
    fuzz(TARGETS[name], seeds()[name], executions=SLOW.get(name, 1500), seed=1)
