import torch

from facetrain.distributed import collectives
from tests.support.ranks import run_ranks


def call_collectives():
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
        "broadcast": collectives.broadcast_json({"from": rank}, source=1),
        "max": collectives.max_(torch.tensor([rank, -rank])),
    }


def test_collectives_return_the_values_of_all_ranks():
    for rank, result in enumerate(results := run_ranks(3, call_collectives)):
        assert result["gathered"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
        # The gradient of row i is i on each of three ranks: summed, and times the world size for DDP's mean.
        assert result["grad"][:, 0].tolist() == [3 * 3 * (2 * rank), 3 * 3 * (2 * rank + 1)]
        assert result["mean"].item() == 1.0 and result["kept"].item() == rank
        assert result["agree"] == [True, False, True]
        assert result["json"] == [["", 0], ["ä", 1], ["ää", 2]]
        assert result["broadcast"] == {"from": 1}
        assert result["max"].tolist() == [2, 0]
    assert len(results) == 3
