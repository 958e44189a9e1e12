"""The same numbers for TensorBoard, and pictures beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


class TensorBoard:
    """Write scalars under the names that metrics.jsonl has, and pictures.

    What a full disk does not take is missing from the graphs; they go on in another file.
    """

    def __init__(self, folder: Path, *, resume_at: int | None = None) -> None:
        """Open a writer; with `resume_at`, TensorBoard hides what an earlier process wrote of later steps."""
        self._folder = folder
        self._writer: Any = _open(folder, None if resume_at is None else resume_at + 1)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write every number among the values."""

        def add(writer: Any) -> None:
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    writer.add_scalar(name, value, step)

        self._try(add)

    def show(self, step: int, pictures: dict[str, np.ndarray]) -> None:
        """Write pictures by name, uint8 (H, W, 3)."""

        def add(writer: Any) -> None:
            for name, pixels_HWC in pictures.items():
                writer.add_image(name, pixels_HWC, step, dataformats="HWC")

        self._try(add)

    def close(self) -> None:
        """Write out what is left, and close."""
        self._try(lambda writer: writer.close())

    def _try(self, use: Callable[[Any], None]) -> None:
        try:
            self._writer = self._writer or _open(self._folder)
            use(self._writer)
        except OSError:
            self._writer = None  # its thread has ended, and would never write again


def _open(folder: Path, purge_step: int | None = None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=purge_step)
