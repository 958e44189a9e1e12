"""Event files for TensorBoard."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from facetrain.telemetry.sink import LoggedRun

_GROUPS = {
    "loss": ("loss", "distill_loss", "grad_norm"),
    "lr": ("lr",),
    "speed": ("images_per_s", "wait_s", "left_s", "peak_memory_gib"),
}
"""Metrics of a training step by group. The group of the others, such as the epoch, is `run`."""


class TensorBoard:
    """Scalars under the grouped names of the metrics, in the folder `tensorboard` of the run."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _silence_writer_threads()
        # TensorBoard names a run after its folder below --logdir, and hides what earlier files have from this step on.
        first_step = 0 if run.resume_at is None else run.resume_at + 1
        folder = run.folder / "tensorboard" / run.name
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write the numbers of a step.

        Raises:
            OSError: the disk does not take them.
        """
        for name, value in values.items():
            self._writer.add_scalar(_grouped(name), value, step)
        # At once: the writer's thread would otherwise report a full disk minutes later.
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


@cache
def _silence_writer_threads() -> None:
    """Let Python print no traceback of a writer's thread: `TensorBoard.write` raises the same error."""
    print_error = threading.excepthook

    def print_others(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith("tensorboard."):
            print_error(failed)

    threading.excepthook = print_others


def _grouped(name: str) -> str:
    """Return the name of a metric with its group in front: "loss/loss", "speed/wait_s", "eval/lfw/accuracy"."""
    if "/" in name:  # the metric of a verification set
        return f"eval/{name}"
    group = next((group for group, names in _GROUPS.items() if name in names), "run")
    return f"{group}/{name}"
