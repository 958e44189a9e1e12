"""Resumes of damaged runs, and the judgement of their ends."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from pathlib import Path

from facetrain.errors import FacetrainError
from tests.soak.damage_readers import MAX_SECONDS
from tests.soak.damage_tally import REFUSAL, RESUME, Tally
from tests.soak.inspect_run import saved_weights
from tests.soak.settings import STEPS
from tests.soak.starter import REFUSED, end_all, fork
from tests.support import training

_MAX_CPU_SECONDS = 60
_MAX_MEMORY = 6 << 30
"""Address space that a resume may add: an absurd size in a file must not end the machine."""
_WAY_ON = re.compile(r"--checkpoint (\d+)")


class Resumer:
    """Resumes damaged runs in forked processes, and compares their weights with those of the undisturbed run."""

    def __init__(self, run: Path, whole: Path) -> None:
        self._run, self._whole = run, saved_weights(whole)
        self._output = run.parent / "output"

    def resume(self, tally: Tally, name: str, *, is_crafted: bool, is_config: bool) -> None:
        """Resume the run, and again from the checkpoint that a refusal names."""
        code, text = self._start(None)
        end = self._judge(tally, f"resume: {name}", code, text, is_crafted=is_crafted, is_config=is_config)
        if code == REFUSED:
            tally.counts[REFUSAL, self._reduced(text)] += 1
            if way_on := _WAY_ON.search(text):
                code, text = self._start(int(way_on[1]))
                again = self._judge(
                    tally, f"resume again: {name}", code, text, is_crafted=is_crafted, is_config=is_config
                )
                if code == REFUSED:
                    tally.add_fault(f"resume: {name}: the named checkpoint is refused too", text[-1500:])
                end = f"{end}; from the checkpoint that the message names: {again}"
        tally.counts[RESUME, end] += 1

    def _judge(
        self, tally: Tally, name: str, code: int, text: str, *, is_crafted: bool, is_config: bool
    ) -> str:
        """Return the end of a resume in a few words; count a fault if it is none of the allowed ones."""
        if code == REFUSED and "Traceback" not in text:
            lines = [line for line in text.splitlines() if line.startswith("error: ")]
            if len(lines) != 1 or text.splitlines()[-1] != lines[0]:
                tally.add_fault(f"{name}: message of several lines", text[-1500:])
            return "refused"
        if code or "Traceback" in text:
            tally.add_fault(f"{name}: exit code {code}", text[-1500:])
            return "fault"
        try:
            if saved_weights(self._run) == self._whole:
                return "continued to the weights of the undisturbed run"
        except FacetrainError:
            pass  # as other weights
        if is_config:
            return "continued with another config, which was reported"
        if is_crafted:
            return f"continued from a crafted checkpoint ({name.partition(': ')[2]})"
        tally.add_fault(f"{name}: other weights than the undisturbed run", text[-1500:])
        return "fault"

    def _start(self, step: int | None) -> tuple[int, str]:
        """Resume in a forked process; return its exit code (negative if it hangs) and its output."""
        self._output.write_bytes(b"")
        child = fork(lambda: self._run_limited(step), self._output)
        deadline = time.monotonic() + MAX_SECONDS
        ended = status = 0
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            end_all()
        code = os.waitstatus_to_exitcode(status) if ended else -signal.SIGKILL
        return code, self._output.read_text(errors="replace")

    def _run_limited(self, step: int | None) -> int:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MAX_MEMORY, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_SECONDS, resource.RLIM_INFINITY))
        # A damaged limit of the steps could let the run train for days.
        return training.go_on(self._run, step, [f"train.max_steps={STEPS}"])

    def _reduced(self, text: str) -> str:
        """Return the last line of a message without names and numbers."""
        line = text.strip().splitlines()[-1].removeprefix("error: ").replace(str(self._run), "RUN")
        return re.sub(r"\d+", "N", re.sub(r"\S*/\S+/step_\d+", "STEP", line))[:150]
