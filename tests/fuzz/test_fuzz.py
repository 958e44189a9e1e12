"""A short run of every fuzz target; long ones are `make fuzz`."""

import pytest

from tests.fuzz import corpus as corpora
from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS, seeds

SLOW = {"config": 150, "peer_config": 300, "mixture": 200, "mxnet_network": 100}


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_input_raises_nothing_but_the_documented_error(name):
    corpus = seeds()[name] + corpora.load(name)
    fuzz(TARGETS[name], corpus, executions=SLOW.get(name, 1500), seed=1)
