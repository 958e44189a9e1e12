import errno
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.elastic.multiprocessing import subprocess_handler
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError
from torch.numa.binding import AffinityMode

from facetrain.distributed.elastic_agent import (
    _exit_code,
    _explain_rendezvous_failure,
    _failure_of_ranks,
    _numa_options,
    _path_options,
    launch_ranks,
)
from facetrain.distributed.process_lifetime import leave_exit_code
from facetrain.distributed.topology import Topology
from facetrain.errors import LaunchError
from tests.support.command import ROOT


def test_a_failed_rendezvous_for_a_restart_is_reported_with_the_reason_of_the_restart(tmp_path):
    lost = RuntimeError("See inner exception.")
    lost.__cause__ = OSError("no connection.")
    message = _explain_rendezvous_failure(lost, "host:1", tmp_path)
    assert message.startswith("the rendezvous at host:1 failed: no connection; check that the port is free")
    (tmp_path / "run_x" / "attempt_0" / "0").mkdir(parents=True)
    message = _explain_rendezvous_failure(lost, "host:1", tmp_path)
    assert "the rendezvous at host:1 for a restart failed (no connection)" in message
    assert "the reason is printed above, or on another host" in message
    (tmp_path / "run_x" / "attempt_0" / "0" / "error.json").write_text('{"message": "rank 1 was stuck"}')
    message = _explain_rendezvous_failure(lost, "host:1", tmp_path)
    assert message.startswith("the ranks of this host ended: rank 1 was stuck; the rendezvous at host:1")


def test_a_host_that_waited_in_vain_advises_to_start_the_others(tmp_path):
    lost = RuntimeError("See inner exception.")
    lost.__cause__ = RendezvousTimeoutError("too few hosts have joined within 600 s")
    message = _explain_rendezvous_failure(lost, "host:1", tmp_path)
    assert message.endswith("within 600 s; start the command on the others within this time")


def failed_ranks(folder, **codes_and_reasons):
    """Return the agent's error for ranks that ended with (exit code, reason of the watchdog, whether it printed it)."""
    failures = {}
    for rank, (code, reason, printed) in enumerate(codes_and_reasons.values()):
        path = folder / f"{rank}.json"
        if reason:
            path.write_text(json.dumps({"message": reason, "printed": printed}))
        failures[rank] = SimpleNamespace(exitcode=code, error_file=str(path), pid=100 + rank)
    return SimpleNamespace(failures=failures)


def test_the_first_cause_is_reported_and_neither_a_rank_that_followed_nor_one_that_the_agent_ended(tmp_path):
    lost = "rank 1 (host, process 101) has ended without a message"
    with pytest.raises(LaunchError, match="rank 1 .process 101. .*SIGKILL"):
        _exit_code(failed_ranks(tmp_path, survivor=(-9, lost, False), killed=(-9, "", False)))
    with pytest.raises(LaunchError, match="rank 1 .process 101. .*SIGKILL"):
        _exit_code(failed_ranks(tmp_path, survivor=(143, lost, False), killed=(-9, "", False)))
    with pytest.raises(LaunchError, match="rank 1 .host, process 101."):
        _exit_code(failed_ranks(tmp_path, survivor=(3, lost, False), other=(-15, lost, False)))
    assert (
        _exit_code(failed_ranks(tmp_path, stopped=(-9, "rank 0 was stopped", True), other=(3, "", False)))
        == 1
    )
    assert _exit_code(failed_ranks(tmp_path, survivor=(3, lost, False), refused=(2, "", False))) == 2
    assert _exit_code(failed_ranks(tmp_path, stopped=(143, "", False), other=(143, "", False))) == 143


def test_after_a_signal_the_code_is_that_of_a_rank_of_the_last_start_that_has_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("FACETRAIN_LAUNCHER", "1")
    assert _failure_of_ranks(tmp_path) == 0, "no rank has started"
    for attempt, exit_code in enumerate([2, 0, 1]):
        rank = tmp_path / "run_x" / f"attempt_{attempt}" / "0"
        rank.mkdir(parents=True)
        os.utime(rank.parent, (9 - attempt, 9 - attempt))  # by a clock that was set back
        if exit_code:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(rank / "error.json"))
            leave_exit_code(exit_code)
        assert _failure_of_ranks(tmp_path) == exit_code
    rank = tmp_path / "run_x" / "attempt_3" / "0"
    rank.mkdir(parents=True)
    assert _failure_of_ranks(tmp_path) == 0
    (rank / "error.json").write_text('{"message": "rank 0 was stopped", "printed": true}')
    assert _failure_of_ranks(tmp_path) == 1, "its watchdog has ended it"


def test_an_abort_of_a_gpu_rank_names_both_causes_and_where_to_look(tmp_path):
    with pytest.raises(LaunchError) as ended:
        _exit_code(failed_ranks(tmp_path, aborted=(-6, "", False)))
    for word in ("SIGABRT", "train.timeout_s", "nccl_collectives_of_rank_0", "illegal access", "ECC"):
        assert word in str(ended.value)


def test_processes_that_cannot_be_started_are_no_failure_of_the_rendezvous(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess_handler.subprocess_handler, "Popen", refuse)
    with pytest.raises(LaunchError, match="processes of the ranks cannot be started: Resource temporarily"):
        launch_ranks([], Topology(nproc_per_node=1))


def test_ranks_are_bound_to_the_cores_beside_their_gpus_where_that_is_possible(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    options = _numa_options(Topology(nproc_per_node=8))
    assert options.affinity_mode == AffinityMode.NODE and options.should_fall_back_if_binding_fails
    assert _numa_options(Topology(nproc_per_node=1)) is _numa_options(Topology(nproc_per_node=16)) is None
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert _numa_options(Topology(nproc_per_node=8)) is None


def test_ranks_import_facetrain_from_the_current_folder_only_if_the_launcher_did(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _path_options() == ["-P"]
    monkeypatch.chdir(ROOT)
    assert _path_options() == []
