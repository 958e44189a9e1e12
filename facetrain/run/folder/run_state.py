"""State of a run, which the leader keeps in `state.json` in the run folder."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel

from facetrain.errors import FacetrainError
from facetrain.files import error_reason, read_regular_text, write_atomically
from facetrain.remote.address import public
from facetrain.run.folder.lock_file import is_locked
from facetrain.signals import EXIT_CODES_OF_SIGNALS

_FILE = "state.json"
RUNNING, STOPPED, FINISHED, FAILED = "running", "stopped", "finished", "failed"


class Start(BaseModel, frozen=True):
    """Start of a run, or of its continuation after a resume or a restart."""

    step: int
    """Step from which training continued; 0 for a new run."""
    ranks: int
    device: str
    """Type of the device: cuda or cpu."""
    time: str = ""
    """Time in UTC, in the format of ISO 8601."""


class RunState(BaseModel, frozen=True):
    """State of a run, according to its files."""

    state: str = FAILED
    """running, stopped (by a signal, after a checkpoint), finished or failed."""
    reason: str = ""
    """Error message of a run that failed, or why a finished run has stopped early."""
    total_steps: int | None = None
    """Last step of the run; None if the run has no `state.json`."""
    starts: tuple[Start, ...] = ()
    """First start, and every resume and restart after it."""


def train_recorded(
    folder: Path,
    start: Start,
    total_steps: int,
    train: Callable[[], int],
    end_reason: Callable[[], str] = lambda: "",
    *,
    continues: bool = True,
) -> int:
    """Call `train`, keep `state.json` up to date, and return the exit code of `train`. For the leader only.

    `end_reason` returns why the run has finished before its last step; empty if it has not. A run that does not
    continue forgets the starts of one that has failed in the folder before its first checkpoint.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    earlier = _read(folder).starts if continues else ()
    starts = (*earlier, start.model_copy(update={"time": now}))
    state = RunState(state=RUNNING, total_steps=total_steps, starts=starts)
    _write(folder, state)
    try:
        exit_code = train()
    # Also KeyboardInterrupt and SystemExit, after which the file must not say that the run trains.
    except BaseException as error:
        _write(folder, state.model_copy(update={"state": FAILED, "reason": _reason(error)}))
        raise
    end = {"state": STOPPED} if exit_code else {"state": FINISHED, "reason": end_reason()}
    _write(folder, state.model_copy(update=end))
    return exit_code


def record_end(folder: Path, state: str, reason: str = "") -> None:
    """Record how a run has ended before the command ends. For the leader only.

    `reason` is that of `RunState`.
    """
    _write(folder, _read(folder).model_copy(update={"state": state, "reason": reason}))


def read_state(folder: Path) -> RunState:
    """Return the state of a run. A run whose process has ended without a message has failed."""
    state = _read(folder)
    if state.state == RUNNING and not is_locked(folder):
        return state.model_copy(update={"state": FAILED, "reason": "its process has ended without a message"})
    return state


def _reason(error: BaseException) -> str:
    """Return why a run has ended; a signal outside the training loop raises SystemExit or KeyboardInterrupt."""
    if isinstance(error, KeyboardInterrupt):
        return f"ended by {signal.SIGINT.name}"
    if isinstance(error, SystemExit) and error.code in EXIT_CODES_OF_SIGNALS:
        return f"ended by {signal.Signals(int(error.code) - 128).name}"
    # The text of other exceptions may be a key alone.
    kind = "" if isinstance(error, (FacetrainError, OSError)) else f"{type(error).__name__}: "
    # A path in it may have bytes that are not UTF-8, which JSON cannot hold.
    return public(kind + error_reason(error))


def _write(folder: Path, state: RunState) -> None:
    with suppress(OSError):  # a full disk must not end the run
        write_atomically(folder / _FILE, state.model_dump_json(indent=1) + "\n")


def _read(folder: Path) -> RunState:
    try:
        return RunState.model_validate_json(read_regular_text(folder / _FILE))
    except (OSError, ValueError):
        return RunState(reason=f"{_FILE} is missing or damaged")
