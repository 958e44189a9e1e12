import os
import signal
import subprocess
import sys

import pytest

from tests.support.command import environment

RANK = """
import os
from facetrain.distributed.process_lifetime import end_with_launcher
{wait}
end_with_launcher()
print("goes on")
"""
LAUNCHER = """
import os, subprocess, sys
from facetrain.distributed.process_lifetime import RUN_ID, mark_own_ranks
mark_own_ranks()
os.environ["TORCHELASTIC_RUN_ID"] = RUN_ID
rank = subprocess.Popen([sys.executable, "-c", {rank!r}])
{end}
"""
WAIT_FOR_THE_END = """
launcher = int(os.environ["FACETRAIN_LAUNCHER"])
while os.getppid() == launcher:
    pass
"""


COMMAND = """
from facetrain.distributed.process_lifetime import end_with_launcher, forget_other_ranks, launched_by_torchrun
forget_other_ranks()
end_with_launcher()
print("a rank" if launched_by_torchrun() else "no rank", flush=True)
"""


RANK_WITH_COMMAND = """
import os, subprocess, sys
from facetrain.distributed.process_lifetime import launched_by_torchrun
print("a rank" if launched_by_torchrun() else "no rank", flush=True)
subprocess.run([sys.executable, "-c", {command!r}], env=os.environ | {change})
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("{}", "no rank"),
        ('{"FACETRAIN_LAUNCHER": str(os.getpid())}', "no rank"),
        ('{"TORCHELASTIC_RUN_ID": "another"}', "a rank"),
    ],
    ids=["command", "command that the launcher has adopted as process 1", "rank of a torchrun"],
)
def test_a_command_that_a_rank_has_started_is_no_rank(change, found):
    code = LAUNCHER.format(rank=RANK_WITH_COMMAND.format(command=COMMAND, change=change), end="rank.wait()")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert done.stdout == f"a rank\n{found}\n"


@pytest.mark.parametrize(
    ("wait", "end", "output"),
    [("", "rank.wait()", "goes on\n"), (WAIT_FOR_THE_END, "os._exit(0)", "")],
    ids=["lives", "ended before"],
)
def test_a_rank_ends_if_its_launcher_ended_while_the_rank_started(wait, end, output):
    code = LAUNCHER.format(rank=RANK.format(wait=wait), end=end)
    # The output is complete when the rank, too, has closed it.
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert done.stdout == output


def test_a_rank_ends_when_its_launcher_is_killed():
    code = LAUNCHER.format(rank=RANK.format(wait="") + "import time; time.sleep(60)", end="rank.wait()")
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        env=environment() | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout.readline() == b"goes on\n"
        os.kill(launcher.pid, signal.SIGKILL)
        assert launcher.stdout.read() == b"", "the rank holds the pipe open until it ends"
