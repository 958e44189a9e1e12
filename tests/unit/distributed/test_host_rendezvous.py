"""Hosts that meet in a store: several handlers in the threads of one process."""

import itertools
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from facetrain.distributed import host_agreement, host_rendezvous
from facetrain.distributed.host_rendezvous import FinalFailure, HostRendezvous
from facetrain.errors import UsageError
from tests.support.command import environment, start
from tests.support.processes import state_of
from tests.support.ranks import free_ports
from tests.support.waiting import wait_until

WAITING = """
import sys
from facetrain.distributed.process_setup import silence_torch_logs
silence_torch_logs()
from facetrain.distributed import host_rendezvous
from facetrain.distributed.elastic_agent import launch_ranks
from facetrain.distributed.topology import topology
host_rendezvous._QUIET_S = 0.0  # it reports at once that it waits
try:
    sys.exit(launch_ranks([], topology("1", "2", sys.argv[1], 0, "cpu")))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(host_agreement, "LAST_CALL_S", 0.0)
    monkeypatch.setattr(host_rendezvous, "_POLL_S", 0.01)
    monkeypatch.setattr(host_rendezvous, "_QUIET_S", 0.1)
    monkeypatch.setattr(host_rendezvous, "_JOIN_S", 20)


@pytest.fixture
def endpoint():
    return f"127.0.0.1:{free_ports(1)[0]}"


def host_at(endpoint, min_hosts, max_hosts, log_dir=Path("no_logs")):
    return HostRendezvous(endpoint, "run", min_hosts, max_hosts, log_dir)


def meet(*hosts, last_call_s=0.0):
    """Let hosts join the next start together; return the sizes that they were told.

    A start of more hosts than the least number needs a last call: without one it is complete before all have joined.
    """
    host_agreement.LAST_CALL_S = last_call_s  # `soon` restores it
    with ThreadPoolExecutor(len(hosts)) as threads:
        joined = [call.result() for call in [threads.submit(host.next_rendezvous) for host in hosts]]
    stores = {
        (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in joined
    }
    assert len(stores) == 1
    joined[0].store.set("key", "value")
    assert all(info.store.get("key") == b"value" for info in joined)
    assert len({info.rank for info in joined}) == len(joined)
    return {info.world_size for info in joined}


def test_nodes_start_again_with_one_that_comes_later_and_without_one_that_is_gone(endpoint):
    hosts = [host_at(endpoint, 2, 3) for _ in range(3)]
    assert meet(*hosts[:2]) == {2}
    assert not hosts[0].num_nodes_waiting()
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(hosts[2].next_rendezvous)
        wait_until(lambda: all(host.num_nodes_waiting() == 1 for host in hosts[:2]))
        assert meet(*hosts[:2], last_call_s=60) == {3} and late.result().world_size == 3
    assert not hosts[0].num_nodes_waiting()
    with ThreadPoolExecutor(1) as thread:
        failed = thread.submit(hosts[2].next_rendezvous)
        wait_until(lambda: hosts[0].num_nodes_waiting() == 1)  # its ranks have failed: another number
        assert meet(hosts[0]) == {2} and failed.result().world_size == 2
    assert hosts[0].shutdown() and hosts[2].is_closed()
    with pytest.raises(RendezvousClosedError, match="another host"):
        hosts[1].next_rendezvous()


def test_a_node_with_other_numbers_of_nodes_ends_and_does_not_disturb_the_others(endpoint):
    hosts = [host_at(endpoint, 1, 2) for _ in range(2)]
    assert meet(hosts[0]) == {1}
    other = host_at(endpoint, 1, 3)
    with pytest.raises(
        UsageError, match=f"--nnodes 1:3: the run at {endpoint} has --nnodes 1:2; give the same"
    ):
        other.next_rendezvous()
    assert other.shutdown() and not hosts[0].is_closed() and not hosts[0].num_nodes_waiting()
    assert meet(*hosts, last_call_s=60) == {2}


@pytest.mark.parametrize(("marks", "ends_all"), [(["no_restart"], True), (["no_restart", "leaves"], False)])
def test_a_node_whose_ranks_cannot_take_part_ends_the_run_only_if_nobody_can(
    endpoint, tmp_path, marks, ends_all
):
    hosts = [host_at(endpoint, 1, 2), host_at(endpoint, 1, 2, tmp_path)]
    assert meet(*hosts, last_call_s=60) == {2}
    folder = tmp_path / "run_x" / "attempt_0" / "0"
    folder.mkdir(parents=True)
    for name in marks:
        (folder / name).touch()
    with pytest.raises(FinalFailure):
        hosts[1].next_rendezvous()
    assert hosts[1].shutdown() and hosts[0].is_closed() == ends_all
    if not ends_all:
        assert meet(hosts[0]) == {1}, "the other one starts again, alone"


@pytest.mark.slow
def test_a_node_that_waits_opens_the_next_start_if_all_nodes_of_the_present_one_are_lost(
    endpoint, monkeypatch
):
    first, second, server, late = (host_at(endpoint, 2, 2) for _ in range(4))
    server._connected = server._connect(
        host_rendezvous._WaitReport(), time.monotonic() + 10
    )  # serves the store
    assert meet(first, second) == {2}
    monkeypatch.setattr(host_rendezvous, "_JOIN_S", 1.0)
    # Longer than this process may have to wait for a core.
    monkeypatch.setattr(host_agreement, "_SILENT_S", 3.0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(server.next_rendezvous)
        for _ in range(40):  # as their agents do while the ranks train
            assert not first.num_nodes_waiting()
            first._asked_at = 0.0
            time.sleep(0.1)
        assert not waiting.done(), "it waits as long as a host is alive"
        assert late.next_rendezvous().world_size == 2
    assert waiting.result().world_size == 2


def test_a_single_node_meets_nobody_and_listens_on_the_loopback_interface(capsys):
    host = host_at("host.example:29400", 1, 1)
    for _ in range(2):
        info = host.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1) and not host.num_nodes_waiting()
        assert info.bootstrap_store_info.master_addr == "127.0.0.1" and host.use_agent_store
    assert host.shutdown() and capsys.readouterr().err == ""


def test_a_state_that_another_program_has_written_is_neither_used_nor_run(endpoint):
    host = host_at(endpoint, 1, 2)
    host.next_rendezvous()
    name, _, port = endpoint.partition(":")
    intruder = TCPStore(name, int(port), is_master=False)
    intruder.set("facetrain/run/state", "gANjYnVpbHRpbnMKZXhpdApxAEsqhXEBUnECLg==")  # a pickle, as c10d's are
    assert not host.num_nodes_waiting(), "ranks that train go on"
    assert not host.shutdown()
    with pytest.raises(RendezvousStateError, match="store"):
        host.next_rendezvous()


@pytest.mark.slow
def test_for_how_many_hosts_a_node_waits_is_reported_once(capsys, monkeypatch, endpoint):
    monkeypatch.setattr(host_rendezvous, "_JOIN_S", 1)
    with pytest.raises(RendezvousTimeoutError, match="1 s"):
        host_at(endpoint, 3, 4).next_rendezvous()
    assert capsys.readouterr().err == (
        f"waiting for 2 more: 1 of 4 hosts have joined at {endpoint}; start the same command on the others\n"
    )


@pytest.mark.slow
def test_each_reason_why_an_endpoint_does_not_answer_is_reported_once(capsys, monkeypatch):
    monkeypatch.setattr(host_rendezvous, "_JOIN_S", 1)
    # 192.0.2.0/24 is reserved for documentation: no host has such an address. What a network says of it differs.
    reasons = itertools.cycle(["No route to host", "timed out"])
    monkeypatch.setattr(HostRendezvous, "_refusal", lambda _: next(reasons))
    with pytest.raises(RendezvousConnectionError):
        host_at("192.0.2.1:29400", 2, 2).next_rendezvous()
    lines = capsys.readouterr().err.splitlines()
    start = "waiting for 192.0.2.1:29400 (--rdzv-endpoint), which does not answer ("
    assert sorted(line.removeprefix(start).partition(")")[0] for line in lines) == [
        "No route to host",
        "timed out",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_wait_for_other_nodes_at_once(number):
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, "192.0.2.1:29400"],
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr.readline().startswith("waiting for 192.0.2.1:29400 (--rdzv-endpoint)")
        process.send_signal(number)
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    # Its own exit, and not the signal's default action, which the first process of a container does not have.
    assert process.returncode == 128 + number
    assert all(line.startswith("waiting for") for line in stderr.splitlines()), (
        "the network may give two reasons"
    )


SERVER = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("serves", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_an_agent_goes_on_while_the_store_does_not_answer_and_joins_when_it_does(
    endpoint, monkeypatch, capsys, tmp_path
):
    (tmp_path / "server.py").write_text(SERVER)
    server = start(endpoint.partition(":")[2], module="server", cwd=tmp_path)
    try:
        assert server.stdout.readline() == "serves\n"
        host = host_at(endpoint, 1, 2)
        assert host.next_rendezvous().world_size == 1
        server.send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(server.pid) == "T")  # the kernel stops it when its thread runs next
        monkeypatch.setattr(host_rendezvous, "_ANSWER_S", 0.2)
        assert not host.num_nodes_waiting(), "ranks that train go on"
        assert not host.shutdown(), "the others cannot learn of it"
        with ThreadPoolExecutor(1) as thread:
            restarted = thread.submit(host.next_rendezvous)
            wait_until(lambda: "does not answer" in capsys.readouterr().err or restarted.done())
            assert not restarted.done()
            monkeypatch.setattr(host_rendezvous, "_ANSWER_S", 20)
            server.send_signal(signal.SIGCONT)
            assert restarted.result(timeout=60).world_size == 1
    finally:
        server.send_signal(signal.SIGKILL)
        server.communicate()
