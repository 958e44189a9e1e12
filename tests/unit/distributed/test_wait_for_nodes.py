import signal
import socket
import subprocess
import sys
import time

import pytest
from torch.distributed import TCPStore

from facetrain.distributed import wait_for_nodes
from facetrain.distributed.topology import topology
from facetrain.distributed.wait_for_nodes import reported_wait
from tests.support.command import environment

BLOCKED = """
import signal, sys, time
from datetime import timedelta
from pathlib import Path
from torch.distributed import TCPStore
from facetrain.distributed.topology import topology
from facetrain.distributed.wait_for_nodes import reported_wait

signal.signal(signal.SIGINT, signal.default_int_handler)
port = int(sys.argv[1])
with reported_wait(topology("1", "2", f"127.0.0.1:{port}", 0, "cpu"), "run", Path(sys.argv[2])):
    print("waits", flush=True)
    TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
"""


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


def test_ctrl_c_ends_a_wait_for_a_host_that_does_not_answer(tmp_path):
    folder = tmp_path / "facetrain-agent"
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        command = [sys.executable, "-c", BLOCKED, str(free.getsockname()[1]), str(folder)]
        process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout.readline() == "waits\n"
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130 and stderr.endswith("error: interrupted\n"), stderr
    assert not folder.exists()


def test_a_single_node_waits_for_no_other(capsys, tmp_path):
    with reported_wait(topology("2", "1", None, 0, "cpu"), "run", tmp_path):
        time.sleep(0.3)
    assert capsys.readouterr().err == ""
