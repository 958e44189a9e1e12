import signal
import time
from types import SimpleNamespace

import torch

from facetrain.distributed import collectives
from facetrain.distributed.stop_request import StopRequest
from facetrain.run.callbacks.checkpointing import Stopping
from tests.support.ranks import run_ranks


def call_collectives():
    rank, world_size = collectives.rank(), collectives.world_size()
    x = torch.full((2, 3), float(rank), requires_grad=True)
    gathered = collectives.GatheredRows(x).wait()
    (gathered * torch.arange(2.0 * world_size)[:, None]).sum().backward()
    lowest = torch.tensor([torch.finfo(torch.float32).min])
    buffers = [torch.tensor([float(rank)]), torch.tensor(rank), lowest]
    collectives.mean_all_(buffers)
    return {
        "gathered": gathered.detach(),
        "grad": x.grad,
        "mean": buffers[0],
        "kept": buffers[1],
        "lowest": lowest,
        "any": [collectives.any_rank(False), collectives.any_rank(rank == 1)],
        "json": collectives.gather_json(["ä" * rank, rank]),
        "broadcast_": collectives.broadcast_(torch.tensor([rank + 2])),
        "broadcast": collectives.broadcast_json({"from": rank}),
        "max": collectives.max_(torch.tensor([rank, -rank])),
    }


def test_collectives_return_the_values_of_all_ranks():
    for rank, result in enumerate(results := run_ranks(3, call_collectives)):
        assert result["gathered"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
        # The gradient of row i is i on each of three ranks: summed, and times the world size for DDP's mean.
        assert result["grad"][:, 0].tolist() == [3 * 3 * (2 * rank), 3 * 3 * (2 * rank + 1)]
        assert result["mean"].item() == 1.0 and result["kept"].item() == rank
        assert result["lowest"].isfinite().all()
        assert result["any"] == [False, True]
        assert result["json"] == [["", 0], ["ä", 1], ["ää", 2]]
        assert result["broadcast_"].tolist() == [2]
        assert result["broadcast"] == {"from": 0}
        assert result["max"].tolist() == [2, 0]
    assert len(results) == 3


def stop_in_step_3(begun):
    """Take steps until the ranks agree to stop; return their number. Rank 1 begins step 2 after rank 0 has begun it."""
    rank = collectives.rank()
    with StopRequest() as request:
        stopping = Stopping(request, lambda line: None)
        for step in range(1, 9):
            deadline = time.monotonic() + 60
            while rank == 1 and step == 2 and not begun.exists():
                assert time.monotonic() < deadline, "rank 0 waits for rank 1 before its step"
                time.sleep(0.01)
            stopping.begin()
            if rank == 0 and step == 2:
                begun.touch()
            if rank == 1 and step == 3:
                signal.raise_signal(signal.SIGTERM)  # received by one rank, after the exchange of this step
            if stopping.agree(SimpleNamespace(step=step, unverified=False)):
                return step
    return None


def test_a_signal_to_one_rank_stops_all_after_the_same_step_and_no_rank_waits_for_the_exchange(tmp_path):
    assert run_ranks(2, stop_in_step_3, tmp_path / "begun") == [4, 4]
