"""Progress of a run on the console: a progress bar on a terminal, one line per report elsewhere."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn


class Console:
    """Progress on standard error. Standard output is for results, which scripts read."""

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
        """Show the progress of training, and the accuracies of a verification."""
        if "loss" in values:
            self._show_progress(step, self._progress_line(step, values))
        accuracies = {
            name.removesuffix("/accuracy"): value
            for name, value in values.items()
            if name.endswith("/accuracy")
        }
        if accuracies:
            text = "  ".join(f"{name} {value:.2%}" for name, value in accuracies.items())
            self.print(f"step {step}: verification accuracy  {text}")

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

    def _progress_line(self, step: int, values: dict[str, Any]) -> str:
        left = timedelta(seconds=round(values.get("left_s", 0)))
        fields = [
            f"step {step}/{self._total_steps}",
            f"loss {values['loss']:.4f}",
            f"lr {values['lr']:.5f}",
            f"{values['images_per_s']:,.0f} images/s",
            f"{left} left",
            f"{values['memory_gib']:.2f} GiB",
        ]
        return "  ".join(fields)
