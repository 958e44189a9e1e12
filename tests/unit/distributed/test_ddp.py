"""Averages of gradients in DDP's buckets."""

from types import SimpleNamespace

import pytest
import torch
from torch.futures import Future

from facetrain.distributed import ddp


@pytest.mark.parametrize(("is_cuda", "awaited"), [(False, [0, 1]), (True, [1])])
def test_ddp_waits_for_all_sums_and_on_a_gpu_for_the_last_one_which_nccl_computes_last(
    is_cuda, awaited, monkeypatch
):
    # On a GPU only a future of NCCL makes the stream wait. Those of `collect_all` do not: DDP would go on at once.
    sums = [Future(), Future()]
    works = iter(SimpleNamespace(get_future=lambda future=each: future) for each in sums)
    monkeypatch.setattr(ddp.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(ddp.dist, "all_reduce", lambda gradient, async_op: next(works))
    gradients, flat = [torch.full((2,), 3.0), torch.full((1,), 6.0)], SimpleNamespace(is_cuda=is_cuda)
    bucket = SimpleNamespace(gradients=lambda: gradients, buffer=lambda: flat)
    averaged = ddp.average_each_gradient(bucket)
    assert [gradient.tolist() for gradient in gradients] == [[1, 1], [2]]
    for place in awaited:
        assert not averaged.done()
        sums[place].set_result(None)
    assert averaged.done() and averaged.value() is flat
