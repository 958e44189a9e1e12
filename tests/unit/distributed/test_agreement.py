import socket
import sys

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

from facetrain import own_parts
from facetrain.distributed import agreement
from facetrain.distributed.agreement import explain_failures, silent_ranks
from facetrain.distributed.ranks import Ranks
from facetrain.distributed.rendezvous import Rendezvous
from facetrain.errors import LostRankError, RankError, RunError
from tests.support.ranks import run_ranks


@pytest.fixture
def store(monkeypatch):
    """A store like that of a rendezvous."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def ranks_of(rank, size, store=None):
    known = store and Rendezvous(store, rank, "id", ["a"] * size, "127.0.0.1", 1, 1)
    return Ranks(rank, rank, size, size, rendezvous=known)


def test_the_ranks_that_do_not_report_are_returned(store):
    PrefixStore("facetrain/id", store).set("alive/1", "")
    assert silent_ranks(ranks_of(0, 3, store), 0.1) == [2]


def test_a_store_that_does_not_answer_names_no_rank(monkeypatch):
    monkeypatch.setattr("facetrain.distributed.agreement._STORE_ANSWERS_WITHIN_S", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert silent_ranks(ranks_of(1, 2, HashStore()), 0.1) is None


def refused_by_the_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def refused_by_cublas():
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.mark.parametrize(
    "fail",
    [refused_by_the_gpu, refused_by_cublas, lambda: torch.empty(10**15), lambda: bytes(1 << 60)],
)
def test_too_little_memory_is_an_error_of_the_run_with_advice(fail):
    message = "rank 3: too little memory .*; `facetrain plan` lists"
    with pytest.raises(RunError, match=message), explain_failures(Ranks(3), 60):
        fail()


NCCL = "NCCL error in: ProcessGroupNCCL.cpp:94, {}, NCCL version 2.27.5\nLast error:\n{}"
SHM = NCCL.format("unhandled system error", "Error while creating shared memory segment /dev/shm/nccl-AbCdEf")
REMOTE = NCCL.format(
    "remote process exited", "ncclRemoteError: A call failed possibly due to a network error"
)
REMOTE_IN_LONG_PATH = REMOTE.replace("ProcessGroup", "/a/build/of/torch" * 20 + "/ProcessGroup")


@pytest.mark.parametrize(
    ("reason", "rank", "silent", "kind", "text"),
    [
        (
            SHM,
            1,
            [],
            RunError,
            "^NCCL error: Error while creating shared memory segment /dev/shm/nccl-AbCdEf;",
        ),
        (SHM.partition("Last error")[0], 1, [], RunError, "^NCCL error in: .*unhandled system error"),
        (REMOTE, 0, [1], LostRankError, "ncclRemoteError"),
        (REMOTE, 0, None, LostRankError, "ncclRemoteError"),
        (REMOTE, 0, [], RunError, "all are alive: .*ncclRemoteError"),
        (REMOTE, 1, [], LostRankError, "ncclRemoteError"),
        (REMOTE_IN_LONG_PATH, 0, [1], LostRankError, "^NCCL error in: /a/build"),
        ("Connection reset by peer", 0, [], RunError, "all are alive: Connection reset"),
        ("Timed out", 0, [1], RankError, r"rank 1 \(this host\) did not answer"),
        ("Timed out", 1, [0], RankError, r"rank 0 \(this host\) did not answer"),
        ("Timed out", 1, [], LostRankError, "Timed out"),
    ],
)
def test_one_rank_says_why_the_group_is_broken(monkeypatch, reason, rank, silent, kind, text):
    monkeypatch.setattr(agreement, "silent_ranks", lambda *_: silent)
    with pytest.raises(RunError, match=text) as ended, explain_failures(ranks_of(rank, 2), 60):
        raise RuntimeError(reason)
    assert type(ended.value) is kind


PART = """
import socket

import torch.distributed as dist


def asks(server):
    raise RuntimeError(f"{server}: connection lost")


def connects(port):
    socket.create_connection(("127.0.0.1", port))


def adds(tensor, group):
    dist.all_reduce(tensor, group=group)
"""


def load_part(folder):
    """Return a module of the user's own, which is a part of the run."""
    (folder / "part_with_a_client.py").write_text(PART)
    sys.path.insert(0, str(folder))
    own_parts.allow(["part_with_a_client:asks"])
    own_parts.load_part("part_with_a_client:asks", "key")
    sys.path.remove(str(folder))
    return sys.modules["part_with_a_client"]


def test_an_error_of_a_part_is_not_taken_for_one_of_the_process_group(tmp_path):
    part = load_part(tmp_path)
    with (
        pytest.raises(RuntimeError, match="^my server: connection lost$"),
        explain_failures(ranks_of(0, 2), 60),
    ):
        part.asks("my server")


def add_without_rank_1(folder):
    group = torch.distributed.new_group()
    if torch.distributed.get_rank() == 1:
        torch.distributed.destroy_process_group(group)  # rank 0 notices that the connection is closed
        return
    part = load_part(folder)
    agreement.silent_ranks = lambda *_: None  # there is no store of a rendezvous
    with pytest.raises(LostRankError), explain_failures(ranks_of(0, 2), 60):
        part.adds(torch.zeros(1), group)


def test_a_collective_in_a_part_fails_as_one_of_the_process_group(tmp_path):
    run_ranks(2, add_without_rank_1, tmp_path)


def test_an_error_of_the_operating_system_in_a_part_names_its_line(tmp_path):
    part = load_part(tmp_path)
    message = r"^rank 0: .*/part_with_a_client\.py:12: Connection refused; "
    with socket.socket() as unheard, pytest.raises(RunError, match=message):
        unheard.bind(("127.0.0.1", 0))  # nobody listens on it, and nobody else can
        with explain_failures(ranks_of(0, 1), 60):
            part.connects(unheard.getsockname()[1])
