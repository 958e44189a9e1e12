"""State of a run, which the leader keeps in `state.json` in the run folder."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from facetrain.files import error_reason, parse_json, read_regular_text, write_atomically
from facetrain.run.folder.lock import is_locked

_FILE = "state.json"
RUNNING, STOPPED, FINISHED, FAILED = "running", "stopped", "finished", "failed"


@dataclass(frozen=True)
class Start:
    """Start of a run, or of its continuation after a resume or a restart."""

    step: int
    """Step from which training continued; 0 for a new run."""
    ranks: int
    device: str
    """Type of the device: cuda or cpu."""
    time: str = ""
    """Time in UTC, in the format of ISO 8601."""


@dataclass(frozen=True)
class RunState:
    """State of a run, according to its files."""

    state: str
    """running, stopped (by a signal, after a checkpoint), finished or failed."""
    reason: str = ""
    """Error message of a run that failed."""
    total_steps: int | None = None
    """Last step of the run; None if the run has no `state.json`."""
    starts: tuple[Start, ...] = ()
    """First start, and every resume and restart after it."""


def train_recorded(folder: Path, start: Start, total_steps: int, train: Callable[[], int]) -> int:
    """Call `train`, keep `state.json` up to date, and return the exit code of `train`. For the leader only."""
    starts = (*_read(folder).starts, Start(**asdict(start) | {"time": _now()}))
    _write(folder, RunState(RUNNING, "", total_steps, starts))
    try:
        exit_code = train()
    except BaseException as error:
        _write(folder, RunState(FAILED, _reason(error), total_steps, starts))
        raise
    _write(folder, RunState(STOPPED if exit_code else FINISHED, "", total_steps, starts))
    return exit_code


def _reason(error: BaseException) -> str:
    """Return why a run has ended; a signal outside the training loop raises SystemExit or KeyboardInterrupt."""
    if isinstance(error, KeyboardInterrupt):
        return f"ended by {signal.SIGINT.name}"
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return f"ended by {signal.Signals(error.code - 128).name}"
    return error_reason(error)


def read_state(folder: Path) -> RunState:
    """Return the state of a run. A run whose process has ended without a message has failed."""
    if not (folder / _FILE).is_file():
        if (folder / "model.safetensors").exists():
            return RunState(FINISHED)
        return RunState(FAILED if (folder / "diverged.json").exists() else STOPPED)
    state = _read(folder)
    if state.state == RUNNING and not is_locked(folder):
        reason = "its process has ended without a message"
        return RunState(FAILED, reason, state.total_steps, state.starts)
    return state


def _write(folder: Path, state: RunState) -> None:
    with suppress(OSError):  # a full disk must not end the run
        write_atomically(folder / _FILE, json.dumps(asdict(state), indent=1) + "\n")


def _read(folder: Path) -> RunState:
    saved = _load(folder)
    starts = saved.get("starts")
    total_steps = saved.get("total_steps")
    return RunState(
        str(saved.get("state", FAILED)),
        str(saved.get("reason", "")),
        total_steps if isinstance(total_steps, int) else None,
        tuple(_start(start) for start in starts if isinstance(start, dict))
        if isinstance(starts, list)
        else (),
    )


def _start(saved: dict[str, Any]) -> Start:
    step, ranks = (saved.get(name, 0) for name in ("step", "ranks"))
    return Start(
        step=step if isinstance(step, int) else 0,
        ranks=ranks if isinstance(ranks, int) else 0,
        device=str(saved.get("device", "")),
        time=str(saved.get("time", "")),
    )


def _load(folder: Path) -> dict[str, Any]:
    """Return the content of the file; empty if it is absent or damaged."""
    try:
        saved = parse_json(read_regular_text(folder / _FILE))
    except (OSError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
