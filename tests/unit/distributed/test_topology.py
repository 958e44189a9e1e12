import pytest

from facetrain.distributed.topology import host_and_port, topology
from facetrain.errors import UsageError


def test_launch_options_are_parsed():
    one = topology("3", "1", None, 0, "cpu")
    assert (one.nproc_per_node, one.min_hosts, one.max_hosts, one.endpoint) == (3, 1, 1, "")
    elastic = topology("auto", "1:2", "host:29400", 3, "cpu")
    assert (elastic.nproc_per_node, elastic.min_hosts, elastic.max_hosts) == (1, 1, 2)
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
        (("1", "2", "host:99999"), "--rdzv-endpoint host:99999: give HOST:PORT, with a port from 1 to 65535"),
        (("1", "2", "host:0"), "--rdzv-endpoint host:0"),
        (("1", "1", "host:-1"), "a port from 0 to 65535"),
        (("1", "2", "host:abc"), "--rdzv-endpoint host:abc"),
        (("1", "2", ":29400"), "--rdzv-endpoint :29400"),
        (("1", "2", "::1"), "put an IPv6 address in brackets"),
        (("1", "2", "host name:1"), "--rdzv-endpoint host name:1"),
        (("1", "2", "node0..cluster:1"), "--rdzv-endpoint node0..cluster:1: give HOST:PORT"),
        (("1", "2", "a" * 64), "--rdzv-endpoint a+: give HOST:PORT"),
    ],
)
def test_invalid_launch_options_are_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        topology(*options, 0, "cpu")


@pytest.mark.parametrize(
    "endpoint", ["host", "node_1.cluster:29400", "node0.:1", "10.0.0.1:1", "[fe80::1]:65535", "[::1]"]
)
def test_an_endpoint_is_a_host_with_or_without_a_port(endpoint):
    assert topology("1", "2", endpoint, 0, "cpu").endpoint == endpoint
    assert topology("1", "1", "localhost:0", 0, "cpu").endpoint == "localhost:0"
    assert host_and_port("[fe80::1]") == ("fe80::1", 29400) and host_and_port("host:1") == ("host", 1)
