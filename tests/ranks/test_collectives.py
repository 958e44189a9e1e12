import torch

from facetrain.distributed import collectives
from tests.support.ranks import run_ranks


def talk():
    rank, world_size = collectives.rank(), collectives.world_size()
    x = torch.full((2, 3), float(rank), requires_grad=True)
    gathered = collectives.gather_rows(x)
    (gathered * torch.arange(2.0 * world_size)[:, None]).sum().backward()
    buffers = [torch.tensor([float(rank)]), torch.tensor(rank)]
    collectives.mean_all_(buffers)
    return {
        "gathered": gathered.detach(),
        "grad": x.grad,
        "mean": buffers[0],
        "kept": buffers[1],
        "agree": [collectives.agree(True), collectives.agree(rank > 0), collectives.any_rank(rank == 1)],
        "json": collectives.gather_json(["ä" * rank, rank]),
        "said": collectives.broadcast_json({"from": rank}, source=1),
        "max": collectives.max_(torch.tensor([rank, -rank])),
    }


def test_ranks_hear_what_they_say_to_one_another():
    for rank, heard in enumerate(results := run_ranks(3, talk)):
        assert heard["gathered"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
        # Each of three ranks gives row i the gradient i; summed, and times the world size for DDP's mean.
        assert heard["grad"][:, 0].tolist() == [3 * 3 * (2 * rank), 3 * 3 * (2 * rank + 1)]
        assert heard["mean"].item() == 1.0 and heard["kept"].item() == rank
        assert heard["agree"] == [True, False, True]
        assert heard["json"] == [["", 0], ["ä", 1], ["ää", 2]]
        assert heard["said"] == {"from": 1}
        assert heard["max"].tolist() == [2, 0]
    assert len(results) == 3
