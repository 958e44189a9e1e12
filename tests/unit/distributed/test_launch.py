import pytest

from facetrain.distributed import collectives
from facetrain.distributed.launch import topology
from facetrain.errors import UsageError


def test_launch_options_are_understood():
    one = topology("3", "1", None, 0, "cpu")
    assert (one.nproc_per_node, one.min_nodes, one.max_nodes, one.endpoint) == (3, 1, 1, "")
    elastic = topology("auto", "1:2", "host:29400", 3, "cpu")
    assert (elastic.nproc_per_node, elastic.min_nodes, elastic.max_nodes, elastic.max_restarts) == (
        1,
        1,
        2,
        3,
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("0", "1", None), "--nproc-per-node 0"),
        (("x", "1", None), "--nproc-per-node x"),
        (("1", "2:1", "h:1"), "--nnodes 2:1"),
        (("1", "none", "h:1"), "--nnodes none"),
        (("1", "2", None), "needs --rdzv-endpoint"),
    ],
)
def test_launch_options_that_make_no_sense_are_named(options, said):
    with pytest.raises(UsageError, match=said):
        topology(*options, 0, "cpu")


def test_alone_every_collective_is_the_identity_that_it_should_be():
    import torch

    x = torch.arange(6.0).view(3, 2).requires_grad_()
    assert collectives.gather_rows(x) is x
    assert torch.equal(collectives.gather(x), x.detach()[None])
    assert torch.equal(collectives.sum_(x.detach().clone()), x)
    assert collectives.agree(True) and not collectives.agree(False)
    assert collectives.gather_json({"a": 1}) == [{"a": 1}] and collectives.broadcast_json("b") == "b"
