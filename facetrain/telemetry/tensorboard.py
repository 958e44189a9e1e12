"""Event files for TensorBoard: the numbers of metrics.jsonl.

Not `torch.utils.tensorboard` (torch 2.13, tensorboard 2.x): on a full disk the thread of its SummaryWriter ends
with a traceback on standard error, every later call raises OSError, and half a record may stay in the file
and hide the records after it. Its import takes as long as the modules used here.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from facetrain.files import error_reason
from facetrain.telemetry.log import warn

_GROUPS = {
    "loss": ("loss", "distill_loss", "grad_norm"),
    "lr": ("lr",),
    "speed": ("images_per_s", "wait_s", "left_s", "peak_memory_gib"),
}
"""Metrics of a training step by group. The group of the others, such as the epoch, is `run`."""


class TensorBoard:
    """Writer of scalars under the grouped names of the metrics.

    A record that a full disk does not take is missing in TensorBoard's graphs. Later records are written again.
    """

    def __init__(self, folder: Path, *, resume_at: int | None = None) -> None:
        """Open a new file. TensorBoard hides what earlier files have for steps after `resume_at` (None: for all steps).

        TensorBoard names the run after the folder.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        # Unbuffered: a record must be on the disk completely or not at all.
        self._file = (folder / name).open("ab", buffering=0)
        self._header = _framed(Event(wall_time=time.time(), file_version="brain.Event:2"))
        """Records to write before the first one."""
        self._has_warned = False
        # TensorBoard drops what earlier files have from this step on.
        first_step = 0 if resume_at is None else resume_at + 1
        start = SessionLog(status=SessionLog.START)
        self._header += _framed(Event(wall_time=time.time(), step=first_step, session_log=start))

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write the numbers of a step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = [{"tag": grouped_name(name), "simple_value": value} for name, value in values.items()]
        record = _framed(Event(wall_time=time.time(), step=step, summary=Summary(value=numbers)))
        # The header goes with the first record: if the disk refuses one of them, both are tried again.
        data, end = self._header + record, self._file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)  # removes half a record, which would hide all that follow
            if not self._has_warned:
                warn(
                    f"{self._file.name}: {error_reason(error)}; TensorBoard's graphs have a gap until writes succeed"
                )
            self._has_warned = True
        else:
            self._header, self._has_warned = b"", False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def grouped_name(name: str) -> str:
    """Return the name of a metric with its group in front: "loss/loss", "speed/wait_s", "eval/lfw/accuracy"."""
    if "/" in name:  # the metric of a verification set
        return f"eval/{name}"
    group = next((group for group, names in _GROUPS.items() if name in names), "run")
    return f"{group}/{name}"


def _framed(event: Any) -> bytes:
    """Return an event in the record format of TensorFlow: length, data and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    framed = BytesIO()
    RecordWriter(framed).write(event.SerializeToString())
    return framed.getvalue()
