import socket
import time

import pytest
from torch.distributed import TCPStore

from facetrain.distributed import wait_for_nodes
from facetrain.distributed.topology import topology
from facetrain.distributed.wait_for_nodes import reported_wait


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(wait_for_nodes, "_QUIET_S", 0.1)
    monkeypatch.setattr(wait_for_nodes, "_POLL_S", 0.05)


def printed_within(capsys, seconds, *words):
    """Wait until the printed lines have all words; return the lines."""
    deadline, text = time.monotonic() + seconds, ""
    while not all(word in text for word in words):
        assert time.monotonic() < deadline, text
        time.sleep(0.02)
        text += capsys.readouterr().err
    return text.splitlines()


def nodes(nnodes, port):
    return topology("1", nnodes, f"127.0.0.1:{port}", 0, "cpu")


def test_a_host_that_does_not_answer_is_named_once_with_its_port(capsys, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with reported_wait(nodes("2", port), "run", tmp_path):
            lines = printed_within(capsys, 10, "Connection refused")
            time.sleep(0.3)
    assert lines[0].startswith(f"waiting for 127.0.0.1:{port} (--rdzv-endpoint), which does not answer (Conn")
    assert len(lines) == 1 and capsys.readouterr().err == ""


def test_the_nodes_that_have_joined_are_counted_until_the_ranks_start(capsys, tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    where = nodes("3:4", store.port)
    with reported_wait(where, "run", tmp_path / "a"):
        printed_within(capsys, 10, f"1 of at least 3 have joined at 127.0.0.1:{store.port}; start")
        with reported_wait(where, "run", tmp_path / "b"):
            printed_within(capsys, 10, "2 of at least 3 have joined")
            (tmp_path / "b" / "run" / "attempt_0").mkdir(parents=True)
            printed_within(capsys, 10, "1 of at least 3 have joined")


def test_a_single_node_waits_for_no_other(capsys, tmp_path):
    with reported_wait(topology("2", "1", None, 0, "cpu"), "run", tmp_path):
        time.sleep(0.3)
    assert capsys.readouterr().err == ""
