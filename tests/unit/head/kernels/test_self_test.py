"""The self-test with which a run decides whether it uses the kernels."""

import pytest


@pytest.mark.xdist_group("found")
@pytest.mark.slow
def test_the_self_test_passes(found):
    assert found["self-test"] == ""
