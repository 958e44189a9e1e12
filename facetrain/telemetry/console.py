"""Progress of a run on the console: a progress bar on a terminal, one line per report elsewhere."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from facetrain.telemetry.log import logger
from facetrain.text import number_text, percent, printable

_SHOWN_TAR = "tar@1e-03"
"""True accept rate that a line shows. LFW's 3,000 impostor pairs measure a FAR of 1 in 1,000 from three pairs, and a
stricter one from a single pair or none."""


class Console:
    """Progress on standard error, and the same lines in log.txt. Standard output is for results, which scripts read."""

    def __init__(self, *, total_steps: int, start_step: int = 0) -> None:
        self._total_steps, self._line = total_steps, ""
        self._terminal = Terminal(stderr=True, highlight=False)
        self._bar: Progress | None = None
        if can_redraw(self._terminal):
            columns = (
                BarColumn(bar_width=24),
                TaskProgressColumn(),
                TextColumn("{task.description}", markup=False),
            )
            self._bar = Progress(*columns, console=self._terminal)
            self._bar.start()
            self._task = self._bar.add_task("", total=total_steps, completed=start_step)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Show the progress of training, and the results of a verification."""
        if "loss" in values:
            line = self._line = _progress_line(step, self._total_steps, values)
            logger.info(line)
            self.advance(step)
            if self._bar is None:
                # Not through rich: it would wrap the line at 80 columns.
                print(line, file=sys.stderr, flush=True)
        for name in values:
            if name.endswith("/accuracy"):
                line = _verification_line(step, name.removesuffix("/accuracy"), values)
                logger.info(line)
                self.print(line)

    def advance(self, step: int, activity: str = "") -> None:
        """Move the bar to a step. An activity, such as "saving", replaces the last report until the next call."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=activity or self._line)

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        # Without markup: a name in brackets would be read as a style.
        self._terminal.print(printable(line), markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


def can_redraw(terminal: Terminal) -> bool:
    """Return whether a bar can be drawn: not on a dumb terminal, nor in a file, a terminal for rich by FORCE_COLOR."""
    # A program may have a stream of its own, with `write` alone, in place of standard error.
    return getattr(terminal.file, "isatty", bool)() and terminal.is_interactive


def _progress_line(step: int, total_steps: int, values: dict[str, Any]) -> str:
    """Return the line of a report of the training metrics."""
    left = timedelta(seconds=round(values.get("left_s", 0)))
    fields = [
        f"step {step}/{total_steps}",
        f"loss {number_text(values['loss'], '.4f')}",
        *([f"distill loss {number_text(values['distill_loss'], '.4f')}"] if "distill_loss" in values else []),
        f"lr {number_text(values['lr'], '.5f')}",
        f"{number_text(values['images_per_s'], ',.0f', smallest=10)} images/s",
        f"{left} left",
        f"peak memory {values['peak_memory_gib']:.2f} GiB",
    ]
    return "  ".join(fields)


def _verification_line(step: int, name: str, values: dict[str, Any]) -> str:
    # With the accuracy alone, a network that is better than chance but not yet by much looks untrained.
    fields = [f"accuracy {percent(values[f'{name}/accuracy'])}"]
    if (auc := values.get(f"{name}/auc")) is not None:
        fields.append(f"AUC {auc:.4f}")
    if (tar := values.get(f"{name}/{_SHOWN_TAR}")) is not None:
        fields.append(f"{_SHOWN_TAR.upper()} {percent(tar)}")
    return f"step {step}: verification of {name}  {'  '.join(fields)}"
