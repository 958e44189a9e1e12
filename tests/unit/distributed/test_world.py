"""Devices of the ranks of two hosts, here threads that share a store."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from facetrain.distributed import devices, world
from facetrain.distributed.process_lifetime import own_local_rank
from facetrain.distributed.ranks import Ranks
from facetrain.distributed.rendezvous import Rendezvous
from facetrain.errors import RunError, UsageError, is_final


def test_the_threads_of_the_caller_are_as_before_after_the_work(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(world, "usable_cores", lambda: 3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with world.join("cpu"):
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("rank", "local_size", "message"),
    [
        ("1", "", "there is no rank 1 of 1 .WORLD_SIZE counts the ranks of all hosts"),
        ("0", "all", "rank 0 could not join .*'all'"),
    ],
)
def test_variables_that_do_not_fit_end_a_rank_at_once(monkeypatch, rank, local_size, message):
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "1", "LOCAL_RANK": ""}
    for name, value in (variables | {"RANK": rank, "LOCAL_WORLD_SIZE": local_size}).items():
        monkeypatch.setenv(name, value)
    assert own_local_rank() == 0
    with pytest.raises(RunError, match=message), world.assemble():
        pass


def picked(monkeypatch, *devices):
    """Let one rank on each host pick its device, where its host has this one; return the devices or errors."""
    monkeypatch.setattr(world, "pick_device", lambda name, local_rank, *, cpu_setting: torch.device(name))
    store, places = HashStore(), [f"host{number}" for number in range(len(devices))]

    def pick(number, device):
        known = Rendezvous(store, number, "id", places, "127.0.0.1", 1, 1)
        try:
            ranks = Ranks(number, 0, len(places), 1, rendezvous=known)
            return world._pick_alike(ranks, device, "train.device: cpu")
        except UsageError as error:
            return str(error)

    with ThreadPoolExecutor(len(devices)) as threads:
        return list(threads.map(pick, range(len(devices)), devices))


@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_all_ranks_end_with_one_line_if_only_some_have_a_gpu(monkeypatch, first, second):
    assert set(picked(monkeypatch, first, first, second)) == {
        f"rank 2 on host2: local rank 0 computes on {second}, and rank 0 on host0 computes on {first}; let torch find "
        "GPUs on all hosts, or use train.device: cpu on all"
    }


@pytest.mark.parametrize(("has_trained", "code"), [(False, 2), (True, 1)])
def test_a_gpu_that_a_run_has_lost_ends_it_as_a_failure_because_it_may_come_back(
    monkeypatch, has_trained, code
):
    monkeypatch.setattr(devices, "gpu_failure", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="local rank 1 has no GPU: this machine has 1") as ended:
        world._pick_alike(Ranks(local_rank=1, has_trained=has_trained), "cuda", "train.device: cpu")
    assert ended.value.exit_code == code and is_final(ended.value) == (not has_trained)


@pytest.mark.parametrize(("count", "number"), [(4, 3), (1, 0)])
def test_a_rank_that_computes_alone_takes_its_gpu_also_if_it_sees_no_other(monkeypatch, count, number):
    launched = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(devices, "gpu_failure", lambda: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with world._alone() as found:
        assert world._pick_alike(found, "auto", "--device cpu") == torch.device("cuda", number)


def test_ranks_whose_devices_have_the_same_type_go_on(monkeypatch):
    assert picked(monkeypatch, "cuda:0", "cuda:1") == [torch.device("cuda:0"), torch.device("cuda:1")]
