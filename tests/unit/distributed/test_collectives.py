import torch

from facetrain.distributed import collectives


def test_on_a_single_process_every_collective_returns_its_input():
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    assert collectives.GatheredRows(x).wait() is x
    assert torch.equal(collectives.gather(x), x.detach()[None])
    assert torch.equal(collectives.sum_(x.detach().clone()), x)
    assert collectives.any_rank(True) and not collectives.any_rank(False)
    assert collectives.gather_json({"a": 1}) == [{"a": 1}] and collectives.broadcast_json("b") == "b"
