import os
import subprocess
import sys

from facetrain.distributed.spawn import GROUP_SIGNALS
from tests.support.command import environment
from tests.support.processes import descendants, kill, wait_until_gone

PROGRAM = """
import signal
from facetrain.distributed.spawn import GROUP_SIGNALS, HelperContext
for number in GROUP_SIGNALS:
    signal.signal(number, lambda *_: None)
queue = HelperContext().Queue()  # of a pool, before its first process
print("started", flush=True)
while True:
    signal.pause()
"""


def test_the_resource_tracker_of_helpers_lives_on_when_a_signal_reaches_the_process_group():
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment(), start_new_session=True
    ) as process:
        assert process.stdout.readline() == b"started\n"
        (tracker,) = descendants(process.pid)
        try:
            for number in GROUP_SIGNALS:
                os.killpg(process.pid, number)
            assert wait_until_gone([tracker], 0.3) == [tracker]
        finally:
            kill([tracker, process.pid])
