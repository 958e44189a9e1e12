"""Rendezvous at a store that still holds the keys of an earlier start."""

import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from facetrain.distributed import rendezvous
from facetrain.distributed.listening_sockets import listen
from facetrain.distributed.rendezvous import _create_id, _open_store, _receive_id
from facetrain.errors import RunError
from tests.support.ranks import free_ports


def ids_of(store, world_size):
    """Return the rendezvous id that each rank gets."""
    with ThreadPoolExecutor(world_size) as threads:
        others = [threads.submit(_receive_id, store, rank) for rank in range(1, world_size)]
        return [_create_id(store, world_size, 10), *(other.result() for other in others)]


def test_all_ranks_of_a_start_get_the_same_id_and_the_next_start_gets_another():
    store = dist.HashStore()
    first, second = ids_of(store, 3), ids_of(store, 3)
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]


def test_the_request_of_an_ended_process_does_not_count_as_a_rank():
    store = dist.HashStore()
    store.set("request/1", "of an ended process")
    with pytest.raises(RunError, match="rank 1 .* 0 s"):
        _create_id(store, 2, 0.2)
    assert len(set(ids_of(store, 2))) == 1


def test_a_long_wait_for_a_rank_is_reported_once(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "_QUIET_S", 0.0)
    with pytest.raises(RunError, match="rank 1 did not arrive"):
        _create_id(dist.HashStore(), 3, 0.2)
    assert capsys.readouterr().err == (
        "waiting for rank 1, which has not arrived yet; see the output of its host\n"
    )


def test_a_signal_ends_the_wait_for_another_rank_and_so_does_its_limit():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RunError, match="other ranks did not arrive within 0 s"):
        _receive_id(store, 1)
    store.set_timeout(timedelta(seconds=60))
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            _receive_id(store, 1)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_program_that_trains_twice_meets_the_other_ranks_in_the_store_of_the_first_time(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_ports(1)[0]))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "")  # restored at the end
    monkeypatch.setattr(rendezvous, "_served", {})
    for number in range(2):
        # Deleted by a program for a process group of its own at another address.
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        server, client = (_open_store(rank, 10.0 + number) for rank in range(2))
        server.set(f"training {number}", "begins")
        assert client.get(f"training {number}") == b"begins"
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    dist.init_process_group("gloo")  # of the program's own, after the training
    dist.destroy_process_group()
    monkeypatch.setenv("MASTER_PORT", str(free_ports(1)[0]))
    assert _open_store(0, 10.0).num_keys() <= 1, "another address has another store"


def test_a_host_whose_own_name_leads_nowhere_does_not_serve_there(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert listen("no-such-host.invalid", 0) is None
