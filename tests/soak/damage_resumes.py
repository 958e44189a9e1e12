"""Resumes of damaged runs, and the judgement of their ends."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import load_config, override_keys
from facetrain.errors import FacetrainError
from facetrain.run import training
from tests.soak.damage_readers import MAX_SECONDS
from tests.soak.damage_tally import Tally
from tests.soak.settings import STEPS

_MAX_RESUME_CPU_SECONDS = 60
_MAX_MEMORY = 6 << 30
"""Address space that a resume may add: an absurd size in a file must not end the machine."""
_REFUSED = 2
"""Exit code of facetrain for an error that it expects."""
_WAY_ON = re.compile(r"--checkpoint (\d+)")


class Resumer:
    """Resumes damaged runs in forked processes, and compares their weights with those of the undisturbed run."""

    def __init__(self, run: Path, whole: Path) -> None:
        self._run, self._whole = run, _weights(whole)
        self._output = run.parent / "output"

    def resume(self, tally: Tally, name: str, *, is_crafted: bool, is_config: bool) -> None:
        """Resume the run, and again from the checkpoint that a refusal names."""
        code, text = self._start(None)
        end = self._judge(tally, f"resume: {name}", code, text, is_crafted=is_crafted, is_config=is_config)
        if code == _REFUSED:
            tally.refusals[self._reduced(text)] += 1
            if way_on := _WAY_ON.search(text):
                code, text = self._start(int(way_on[1]))
                again = self._judge(
                    tally, f"resume again: {name}", code, text, is_crafted=is_crafted, is_config=is_config
                )
                if code == _REFUSED:
                    tally.add_fault(f"resume: {name}: the named checkpoint is refused too", text[-1500:])
                end = f"{end}; from the checkpoint that the message names: {again}"
        tally.resumes[end] += 1

    def _judge(
        self, tally: Tally, name: str, code: int | None, text: str, *, is_crafted: bool, is_config: bool
    ) -> str:
        """Return the end of a resume in a few words; count a fault if it is none of the allowed ones."""
        if code == _REFUSED and "Traceback" not in text:
            lines = [line for line in text.splitlines() if line.startswith("error: ")]
            if len(lines) != 1 or text.splitlines()[-1] != lines[0]:
                tally.add_fault(f"{name}: message of several lines", text[-1500:])
            return "refused"
        if code != 0 or "Traceback" in text:
            tally.add_fault(f"{name}: {'hangs' if code is None else f'exit code {code}'}", text[-1500:])
            return "fault"
        try:
            is_equal = _weights(self._run) == self._whole
        except FacetrainError:
            is_equal = False
        if is_equal:
            return "continued to the weights of the undisturbed run"
        if is_config:
            return "continued with another config, which was reported"
        if is_crafted:
            return f"continued from a crafted checkpoint ({name.partition(': ')[2]})"
        tally.add_fault(f"{name}: other weights than the undisturbed run", text[-1500:])
        return "fault"

    def _start(self, step: int | None) -> tuple[int | None, str]:
        """Resume in a forked process; return its exit code, or None if it hangs, and what it printed."""
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            log = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + _MAX_MEMORY, resource.RLIM_INFINITY))
            resource.setrlimit(resource.RLIMIT_CPU, (_MAX_RESUME_CPU_SECONDS, resource.RLIM_INFINITY))
            # A damaged limit of the steps could let the run train for days.
            limit = [f"train.max_steps={STEPS}"]
            try:
                config = load_config(self._run / "config.yaml", limit)
                os._exit(training.resume(config, self._run, step, set_keys=override_keys(limit)))
            except FacetrainError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                os._exit(_REFUSED)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(99)
        code = _wait(child, MAX_SECONDS)
        return code, self._output.read_text(errors="replace")

    def _reduced(self, text: str) -> str:
        """Return the last line of a message without names and numbers."""
        line = text.strip().splitlines()[-1].removeprefix("error: ").replace(str(self._run), "RUN")
        return re.sub(r"\d+", "N", re.sub(r"\S*/\S+/step_\d+", "STEP", line))[:150]


def _wait(child: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return None if code == -signal.SIGXCPU else code
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _weights(run: Path) -> dict[str, str]:
    return {
        entry.name: entry.sha256
        for entry in Checkpoint.open(run).manifest.files
        if entry.name.startswith(("rep", "rows"))
    }
