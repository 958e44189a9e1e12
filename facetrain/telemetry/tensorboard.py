"""The same numbers for TensorBoard, and pictures beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


class TensorBoard:
    """Write scalars under the names that metrics.jsonl has, and pictures."""

    def __init__(self, folder: Path, *, resume_at: int | None = None) -> None:
        """Open a writer; with `resume_at`, TensorBoard hides what an earlier process wrote of later steps."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_at)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write every number among the values."""
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)

    def show(self, step: int, pictures: dict[str, np.ndarray]) -> None:
        """Write pictures by name, uint8 (H, W, 3)."""
        for name, pixels_HWC in pictures.items():
            self._writer.add_image(name, pixels_HWC, step, dataformats="HWC")

    def close(self) -> None:
        """Write out what is left, and close."""
        self._writer.close()
