"""Progress of a run on the console: a progress bar on a terminal, one line per report elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from facetrain.telemetry.log import logger
from facetrain.telemetry.report_lines import progress_line, verification_lines


class Console:
    """Progress on standard error, and the same lines in log.txt. Standard output is for results, which scripts read."""

    def __init__(self, *, total_steps: int, start_step: int = 0) -> None:
        self._total_steps = total_steps
        self._terminal = Terminal(stderr=True, highlight=False)
        self._bar: Progress | None = None
        if self._terminal.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=24),
                TaskProgressColumn(),
                TextColumn("{task.description}"),
                console=self._terminal,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=total_steps, completed=start_step)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Show the progress of training, and the results of a verification."""
        if "loss" in values:
            line = progress_line(step, self._total_steps, values)
            logger.info(line)
            self._show_progress(step, line)
        for line in verification_lines(step, values):
            logger.info(line)
            self.print(line)

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self._terminal.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _show_progress(self, step: int, line: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=line)
        else:
            # Not through rich: it would wrap the line at 80 columns.
            print(line, file=sys.stderr, flush=True)
