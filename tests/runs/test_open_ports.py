"""On one host no process listens where another host could connect."""

import pytest

from tests.support.command import ROOT, TORCHRUN, facetrain, start
from tests.support.processes import descendants, ranks_of
from tests.support.ranks import free_ports
from tests.support.runs import checked
from tests.support.sockets import listening_addresses
from tests.support.waiting import wait_until


def addresses_until_the_end(process, pids):
    """Return the addresses at which `pids()` have listened until the process has ended, and its messages."""
    addresses = set()

    def has_ended():
        addresses.update(listening_addresses(pids()))
        return process.poll() is not None

    wait_until(has_ended, every_s=0.1)
    stderr = process.communicate()[1]
    assert process.returncode == 0, stderr
    return addresses, stderr


def all_of(process):
    return lambda: [process.pid, *descendants(process.pid)]


# Seconds for further hosts to join.
QUICK = """
from facetrain.distributed import host_agreement
host_agreement.LAST_CALL_S = 2
"""
TWO_RANKS = ("--nproc-per-node", 2)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        pytest.param("train", (*TWO_RANKS, "--max-restarts", 1), marks=pytest.mark.slow),
        pytest.param(
            "train", ("--nnodes", "1:2", "--rdzv-endpoint", "localhost:PORT"), marks=pytest.mark.slow
        ),
        pytest.param("train", (*TWO_RANKS, "--rdzv-endpoint", "localhost:0"), marks=pytest.mark.long),
        # The others are launched as the first one.
        pytest.param("resume", TWO_RANKS, marks=pytest.mark.long),
        pytest.param("bench train", (*TWO_RANKS, "--steps", 1, "--rounds", 1), marks=pytest.mark.long),
    ],
    ids=["two ranks", "a range of hosts", "an endpoint", "resume", "bench"],
)
def test_no_command_on_one_host_listens_on_another_interface_than_loopback(
    describe, tmp_path, command, options
):
    config, folder = describe(workers=1, steps=4), tmp_path / "run"
    options = [str(each).replace("PORT", str(free_ports(1)[0])) for each in options]
    arguments = {
        "train": ("--config", config, "--run-dir", folder),
        "resume": (folder, "--set", "train.max_steps=4"),
        "bench train": ("--config", config),
    }[command]
    if command == "resume":
        checked(facetrain("train", "--config", describe(steps=2), "--run-dir", folder))
    (tmp_path / "sitecustomize.py").write_text(QUICK)
    process = start(*command.split(), *arguments, *options, PYTHONPATH=f"{tmp_path}:{ROOT}")
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
    process = start(*command, module=TORCHRUN)
    addresses, stderr = addresses_until_the_end(process, lambda: list(ranks_of(process.pid).values()))
    assert addresses and all(address.is_loopback for address in addresses)
    warnings = [line for line in stderr.splitlines() if line.startswith("warning: port ")]
    assert len(warnings) == 1 and "is open to all machines that reach this one" in warnings[0]
