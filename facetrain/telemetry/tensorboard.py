"""The same numbers for TensorBoard, and images beside them.

TensorBoard's own writer has a thread, which ends with a traceback when the disk is full, and half a record
in its file hides all that follow. Here the file is written by whoever reports, whole records or none.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from facetrain.telemetry.log import warn


class TensorBoard:
    """Write scalars under the names that metrics.jsonl has, and images.

    What a full disk does not take is missing from the graphs; they go on when there is room again.
    """

    def __init__(self, folder: Path, *, resume_at: int | None = None) -> None:
        """Open a file; with `resume_at`, TensorBoard hides what an earlier process wrote of later steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._opening = _framed(Event(wall_time=time.time(), file_version="brain.Event:2"))
        """What comes before the first record."""
        self._is_refused = False
        if resume_at is not None:
            started = SessionLog(status=SessionLog.START)
            self._opening += _framed(Event(wall_time=time.time(), step=resume_at + 1, session_log=started))

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write every number among the values."""
        numbers = {
            name: value
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        self._add(step, [{"tag": name, "simple_value": number} for name, number in numbers.items()])

    def show(self, step: int, images: dict[str, np.ndarray]) -> None:
        """Write images by name, uint8 (H, W, 3)."""
        self._add(step, [{"tag": name, "image": _image(pixels)} for name, pixels in images.items()])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, step: int, values: list[dict[str, Any]]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        record = _framed(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        data, end = self._opening + record, self._file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)
            if not self._is_refused:
                warn(
                    f"{self._file.name}: {error.strerror}; until there is room, TensorBoard's graphs have a gap"
                )
            self._is_refused = True
        else:
            self._opening, self._is_refused = b"", False


def _framed(event: Any) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    framed = BytesIO()
    RecordWriter(framed).write(event.SerializeToString())
    return framed.getvalue()


def _image(pixels_HWC: np.ndarray) -> dict[str, Any]:
    height, width, _ = pixels_HWC.shape
    _, encoded = cv2.imencode(".png", pixels_HWC[:, :, ::-1])
    return {"height": height, "width": width, "colorspace": 3, "encoded_image_string": encoded.tobytes()}
