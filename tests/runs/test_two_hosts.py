"""One run on two hosts: the network between them is cut and repaired, and one of them is lost and returns."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from facetrain.checkpoint.load import Checkpoint
from facetrain.telemetry.jsonl import read_jsonl
from tests.support.command import ROOT, environment, start
from tests.support.hosts import two_hosts
from tests.support.processes import descendants, kill, wait_until_gone

# Seconds for further hosts to join, and until a host without a sign of life counts as gone.
QUICK = """
import sys
if "facetrain" in sys.orig_argv:
    from facetrain.distributed import host_agreement
    host_agreement.LAST_CALL_S, host_agreement._SILENT_S = 2, 3
"""


def start_agent(host, store_host, config, folder):
    """Start an agent with one rank on a host, as `recipes/launch/many_nodes.sh` does."""
    command = host.command(
        sys.executable, "-m", "facetrain", "train", "--config", config, "--run-dir", folder,
        "--nnodes", "1:2", "--nproc-per-node", 1, "--max-restarts", 20,
        "--rdzv-endpoint", f"{store_host.address}:29400",
        "--set", "train.max_steps=100000", "--set", "train.epochs=100000", "--set", "train.timeout_s=8",
    )  # fmt: skip
    (folder.parent / "sitecustomize.py").write_text(QUICK)
    variables = environment(GLOO_SOCKET_IFNAME=host.interface, PYTHONPATH=f"{folder.parent}:{ROOT}")
    with folder.with_name(f"output_{host.name}").open("ab") as output:
        return subprocess.Popen(command, env=variables, stdout=output, stderr=output)


def wait_for_training(folder, ranks, agent, timeout_s=90):
    """Wait until the run has made three steps on so many ranks; return its step."""
    deadline, first = time.monotonic() + timeout_s, None
    while time.monotonic() < deadline:
        assert agent.poll() is None, "the agent that hosts the rendezvous has ended"
        time.sleep(0.1)
        try:
            size = json.loads((folder / "environment.json").read_text())["world_size"]
            step = read_jsonl(folder / "metrics.jsonl")[-1]["step"]
        except (OSError, IndexError):
            continue
        first = step if first is None or size != ranks or step < first else first
        if step >= first + 3:
            return step
    raise AssertionError(f"the run does not train on {ranks} ranks")


@pytest.mark.long
def test_a_run_survives_a_cut_network_and_a_lost_host_and_takes_the_host_back(describe, tmp_path):
    config, folder = describe(workers=1, checkpoint="every_steps: 2, keep: 3"), tmp_path / "run"
    with two_hosts() as (first, second):
        agents = [start_agent(host, first, config, folder) for host in (first, second)]
        try:
            steps = [wait_for_training(folder, 2, agents[0])]
            second.set_link("down")
            steps.append(wait_for_training(folder, 1, agents[0]))
            second.set_link("up")
            steps.append(wait_for_training(folder, 2, agents[0]))
            kill([agents[1].pid, *descendants(agents[1].pid)])
            steps.append(wait_for_training(folder, 1, agents[0]))
            agents.append(start_agent(second, first, config, folder))
            steps.append(wait_for_training(folder, 2, agents[0]))
            assert steps == sorted(steps), "after every change training continues from where it was"
            # Not those of this process: tests before this one may have left a fork server.
            processes = [pid for agent in agents for pid in [agent.pid, *descendants(agent.pid)]]
            for agent in (agents[0], agents[2]):
                agent.send_signal(signal.SIGTERM)
            assert not wait_until_gone(processes)
        finally:
            kill(pid for agent in agents for pid in [agent.pid, *descendants(agent.pid)])
            for agent in agents:
                agent.wait()
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    assert checkpoint.step >= steps[-1] and checkpoint.manifest.world_size == 2


@pytest.mark.slow
def test_two_hosts_train_where_the_name_of_each_leads_to_its_loopback_interface(describe, tmp_path):
    config, folder = describe(workers=1, steps=3), tmp_path / "run"
    with two_hosts() as (first, second):
        # As the installers of Debian and Ubuntu write it.
        names = [[("127.0.1.1", "node0")], [(first.address, "node0"), ("127.0.1.1", "node1")]]
        agents = []
        for host, table in zip((first, second), names, strict=True):
            place = tmp_path / host.name
            place.mkdir()
            host.let_enter(place, *table)
            agents.append(
                start(
                    "train", "--config", config, "--run-dir", folder, "--nnodes", 2, "--nproc-per-node", 1,
                    "--rdzv-endpoint", "node0:29400", "--set", "train.timeout_s=20",
                    PYTHONPATH=f"{place}:{ROOT}",
                )
            )  # fmt: skip
        outputs = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert "could not connect" not in "".join(stderr for _, stderr in outputs), "the watchdogs are connected"
    logs = [(folder / name).read_text() for name in ("log.txt", "log_00001.txt")]
    assert [set(re.findall(r"rank \d", log)) for log in logs] == [{"rank 0"}, {"rank 1"}], "NFS loses lines"
