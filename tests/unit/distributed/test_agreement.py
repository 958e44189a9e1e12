import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from facetrain.distributed.agreement import explain_failures, silent_ranks
from facetrain.distributed.rendezvous import register_rank
from facetrain.distributed.world import World
from facetrain.errors import RunError


@pytest.fixture
def store(monkeypatch):
    """A store like that of a rendezvous."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def test_the_ranks_that_do_not_report_are_returned_with_their_places(store):
    own = PrefixStore("facetrain/id", store)
    for rank in range(3):
        register_rank(own, rank)
    own.set("alive/1", "")
    silent = silent_ranks("id", 0, 3, 0.1)
    assert silent.keys() == {2} and ", process " in silent[2]


def test_a_store_that_does_not_answer_names_no_rank(monkeypatch):
    monkeypatch.setattr("facetrain.distributed.agreement._STORE_ANSWERS_WITHIN_S", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert silent_ranks("id", 1, 2, 0.1) == {}


def refused_by_the_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def refused_by_cublas():
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.mark.parametrize(
    "fail",
    [refused_by_the_gpu, refused_by_cublas, lambda: torch.empty(10**15), lambda: bytes(1 << 60)],
)
def test_too_little_memory_is_an_error_of_the_run_with_advice(fail):
    world = World(rank=3, local_rank=0, size=1, local_size=1, device=torch.device("cpu"))
    message = "rank 3: too little memory .*; `facetrain plan` lists"
    with pytest.raises(RunError, match=message), explain_failures(world, 60):
        fail()
