"""On one host no process listens where another host could connect."""

import subprocess
import sys
import time

import pytest

from tests.runs.test_training import checked
from tests.support.command import environment, facetrain, start
from tests.support.processes import descendants, ranks_of
from tests.support.sockets import listening_addresses


def addresses_until_the_end(process, pids):
    """Return the addresses at which `pids()` have listened until the process has ended, and its messages."""
    addresses = set()
    while process.poll() is None:
        addresses |= listening_addresses(pids())
        time.sleep(0.1)
    stderr = process.communicate()[1]
    assert process.returncode == 0, stderr
    return addresses, stderr


def all_of(process):
    return lambda: [process.pid, *descendants(process.pid)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--nproc-per-node", 2, "--max-restarts", 1), marks=pytest.mark.slow),
        pytest.param(("--nnodes", "1:2", "--rdzv-endpoint", "localhost:29417"), marks=pytest.mark.long),
        pytest.param(("--nproc-per-node", 2, "--rdzv-endpoint", "localhost:0"), marks=pytest.mark.long),
    ],
    ids=["two ranks", "a range of nodes", "an endpoint"],
)
def test_a_run_on_one_host_listens_on_the_loopback_interface_only(describe, tmp_path, options):
    process = start("train", "--config", describe(steps=4), "--run-dir", tmp_path / "run", *options)
    addresses, _ = addresses_until_the_end(process, all_of(process))
    assert addresses and all(address.is_loopback for address in addresses)


@pytest.mark.slow
def test_the_ranks_of_torchrun_listen_on_the_loopback_interface_and_its_own_port_is_reported(
    describe, dataset, tmp_path
):
    folder = tmp_path / "run"
    checked(facetrain("train", "--config", describe(steps=4), "--run-dir", folder))
    target = dataset / "data" / "val.bin"
    command = ["--standalone", "--nproc-per-node", 2, "-m", "facetrain", "eval", folder, "--target", target]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *map(str, command)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    addresses, stderr = addresses_until_the_end(process, lambda: list(ranks_of(process.pid).values()))
    assert addresses and all(address.is_loopback for address in addresses)
    warnings = [line for line in stderr.splitlines() if line.startswith("warning: port ")]
    assert len(warnings) == 1 and "is open to all hosts that reach this one" in warnings[0]
