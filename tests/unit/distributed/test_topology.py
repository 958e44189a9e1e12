import pytest

from facetrain.distributed.topology import topology
from facetrain.errors import UsageError


def test_launch_options_are_parsed():
    one = topology("3", "1", None, 0, "cpu")
    assert (one.nproc_per_node, one.min_nodes, one.max_nodes, one.endpoint) == (3, 1, 1, "")
    elastic = topology("auto", "1:2", "host:29400", 3, "cpu")
    assert (elastic.nproc_per_node, elastic.min_nodes, elastic.max_nodes) == (1, 1, 2)
    assert (elastic.endpoint, elastic.max_restarts) == ("host:29400", 3)


@pytest.mark.parametrize(
    ("options", "needs_no_agent"),
    [
        (("1", "1", None, 0), True),
        (("auto", "1", None, 0), True),
        (("2", "1", None, 0), False),
        (("1", "1:2", "host:1", 0), False),
        (("1", "1", None, 1), False),
    ],
)
def test_one_process_that_is_never_restarted_needs_no_agent(options, needs_no_agent):
    assert topology(*options, "cpu").is_single_process == needs_no_agent


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("0", "1", None), "--nproc-per-node 0"),
        (("x", "1", None), "--nproc-per-node x"),
        (("²", "1", None), "--nproc-per-node ²"),
        (("1" * 5000, "1", None), "--nproc-per-node 1"),
        (("1", "2:1", "h:1"), "--nnodes 2:1"),
        (("1", "none", "h:1"), "--nnodes none"),
        (("1", "2", None), "needs --rdzv-endpoint"),
    ],
)
def test_invalid_launch_options_are_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        topology(*options, 0, "cpu")
