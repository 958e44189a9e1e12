import pytest

from facetrain.distributed import collectives
from facetrain.distributed.launch import _unmet, topology
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


def test_machines_that_do_not_meet_again_say_what_had_ended_the_run_before(tmp_path):
    lost = RuntimeError("See inner exception.")
    lost.__cause__ = OSError("no connection.")
    assert "at host:1: no connection; is the port free and reachable?" in _unmet(lost, "host:1", tmp_path)
    (tmp_path / "run_x" / "attempt_0" / "0").mkdir(parents=True)
    said = _unmet(lost, "host:1", tmp_path)
    assert "the machines did not meet again at host:1 (no connection)" in said
    assert "what ended it is said above, or by another machine" in said
    (tmp_path / "run_x" / "attempt_0" / "0" / "error.json").write_text('{"message": "rank 1 was stuck"}')
    assert "the run has ended here: rank 1 was stuck; the machines" in _unmet(lost, "host:1", tmp_path)


def test_alone_every_collective_is_the_identity_that_it_should_be():
    import torch

    x = torch.arange(6.0).view(3, 2).requires_grad_()
    assert collectives.gather_rows(x) is x
    assert torch.equal(collectives.gather(x), x.detach()[None])
    assert torch.equal(collectives.sum_(x.detach().clone()), x)
    assert collectives.agree(True) and not collectives.agree(False)
    assert collectives.gather_json({"a": 1}) == [{"a": 1}] and collectives.broadcast_json("b") == "b"
