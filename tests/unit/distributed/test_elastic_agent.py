import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from facetrain.distributed.elastic_agent import _exit_code, _explain_rendezvous_failure
from facetrain.errors import LaunchError
from tests.support.command import environment


def test_a_failed_rendezvous_for_a_restart_is_reported_with_the_reason_of_the_restart(tmp_path):
    lost = RuntimeError("See inner exception.")
    lost.__cause__ = OSError("no connection.")
    message = _explain_rendezvous_failure(lost, "host:1", tmp_path)
    assert message.startswith("the rendezvous at host:1 failed: no connection; check that the port is free")
    (tmp_path / "run_x" / "attempt_0" / "0").mkdir(parents=True)
    message = _explain_rendezvous_failure(lost, "host:1", tmp_path)
    assert "the rendezvous at host:1 for a restart failed (no connection)" in message
    assert "the reason is printed above, or on another node" in message
    (tmp_path / "run_x" / "attempt_0" / "0" / "error.json").write_text('{"message": "rank 1 was stuck"}')
    message = _explain_rendezvous_failure(lost, "host:1", tmp_path)
    assert message.startswith("the ranks of this node ended: rank 1 was stuck; the rendezvous at host:1")


STUCK = """
import json, sys, time
from pathlib import Path
from facetrain.distributed import elastic_agent
from facetrain.distributed.topology import topology
elastic_agent._STUCK_S, elastic_agent._POLL_S = 0.2, 0.05
folder = Path(sys.argv[1])
error = folder / "run" / "attempt_0" / "0" / "error.json"
error.parent.mkdir(parents=True)
with elastic_agent._ended_if_stuck(topology("1", "2", "host:1", int(sys.argv[2]), "cpu"), folder):
    error.write_text(json.dumps({"message": "rank 0 cannot be reached", "printed": False}))
    time.sleep(2)
"""


@pytest.mark.parametrize(("restarts", "code"), [("0", 1), ("1", 0)])
def test_an_agent_that_is_stuck_after_the_end_of_its_ranks_is_ended_unless_it_may_restart(
    tmp_path, restarts, code
):
    command = [sys.executable, "-c", STUCK, tmp_path / "agent", restarts]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert done.stderr == ("error: the ranks of this node ended: rank 0 cannot be reached\n" if code else "")


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
    with pytest.raises(LaunchError, match="rank 1 .process 101. was ended by SIGKILL"):
        _exit_code(failed_ranks(tmp_path, survivor=(-9, lost, False), killed=(-9, "", False)))
    with pytest.raises(
        LaunchError, match="the ranks of this node ended: rank 1 .host, process 101. has ended"
    ):
        _exit_code(failed_ranks(tmp_path, survivor=(3, lost, False), other=(-15, lost, False)))
    assert (
        _exit_code(failed_ranks(tmp_path, stopped=(-9, "rank 0 was stopped", True), other=(3, "", False)))
        == 1
    )
    assert _exit_code(failed_ranks(tmp_path, survivor=(3, lost, False), refused=(2, "", False))) == 2
