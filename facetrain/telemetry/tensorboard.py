"""The same numbers for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TensorBoard:
    """Write scalars under the names that metrics.jsonl has."""

    def __init__(self, folder: Path, *, resume_at: int | None = None) -> None:
        """Open a writer; with `resume_at`, TensorBoard hides what an earlier process wrote of later steps."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_at)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write every number among the values."""
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is left, and close."""
        self._writer.close()
