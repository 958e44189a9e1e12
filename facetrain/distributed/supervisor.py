"""Starts a process and stands by it: passes signals on, starts it again where it fails, waits for its end.

For a run of one process on one machine, which has nobody to meet: torchrun's agent would import torch, seconds and
half a gigabyte, only to wait.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

from facetrain.distributed.process_lifetime import LAUNCHER

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGINT)


class Supervisor:
    """Runs one command at a time."""

    def __init__(self, grace_s: int) -> None:
        """Take how many seconds after a signal what is still there is killed."""
        self.pid = 0
        """Of the process that was started last."""
        self.stopped_by = 0
        """The signal that has come; 0: none."""
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._told = False

    def run(self, command: list[str], max_restarts: int) -> int:
        """Run a command until it succeeds, or a signal comes, or it has failed once too often.

        Return its last exit code; where a signal has ended it, minus the number of that.
        """
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        signal.signal(signal.SIGALRM, self._kill)
        for restarts in range(max_restarts + 1):
            code = self._run_once(command, restarts)
            if code == 0 or self.stopped_by:
                break
        return code

    def _run_once(self, command: list[str], restarts: int) -> int:
        variables = {LAUNCHER: str(os.getpid()), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        # A session of its own: a Ctrl-C reaches it through this process alone, once.
        self._process = subprocess.Popen(command, env=os.environ | variables, start_new_session=True)
        self.pid = self._process.pid
        if self.stopped_by and not self._told:  # the signal came while it was being started
            self._tell(self.stopped_by)
        return self._process.wait()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Have the process save and end; a second Ctrl-C ends it and this process at once."""
        if number == self.stopped_by == signal.SIGINT:
            self._kill(number, frame)
            print("error: interrupted", file=sys.stderr, flush=True)
            os._exit(128 + number)
        self.stopped_by = number
        signal.alarm(max(self._grace_s, 1))
        if self._process is not None:
            self._tell(number)

    def _tell(self, number: int) -> None:
        self._told = True
        assert self._process is not None, "it was started"
        self._process.send_signal(number)

    def _kill(self, number: int, frame: FrameType | None) -> None:
        if self._process is not None:
            self._process.kill()
