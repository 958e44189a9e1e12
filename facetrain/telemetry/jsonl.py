"""Files with one JSON object per line, such as metrics.jsonl."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from facetrain.errors import RunError
from facetrain.files import (
    error_reason,
    open_regular,
    os_errors_as,
    parse_json,
    replacing,
    sync_file,
    sync_folder,
)
from facetrain.telemetry.log import warn, was_replaced
from facetrain.text import count_text


class JsonLines:
    """Writer that appends records to a file. What a disk refuses it keeps and writes later."""

    def __init__(self, path: Path, *, resume_at: int | None = None) -> None:
        """Open a file for appending.

        Without `resume_at`, an existing file is removed. With it, records of later steps are removed,
        because those steps are trained again, and a record that the file already has for that step is not
        written a second time. Changes of the config at that step are removed: the resume writes its own.
        """
        self._known: set[str] = set()
        with os_errors_as(RunError, path):
            if path.exists() and not path.is_file():
                raise RunError(f"{path}: not a regular file; remove it, and the run writes a new one")
            if resume_at is None:
                path.unlink(missing_ok=True)
            elif path.exists():
                self._known = _truncate(path, resume_at)
            elif path.is_symlink():
                path.unlink()  # it leads to nothing, where the writer would create a file
            # Unbuffered: what a failed write has left in a buffer of Python could not be found out.
            self._file = path.open("ab", buffering=0)
            self._synced_size = os.fstat(self._file.fileno()).st_size
        # The records after the last sync, and how many of their bytes the file has taken.
        self._unsynced, self._written = bytearray(), 0
        self._fault: OSError | None = None
        """Why the disk has refused the pending records."""
        # The thread that writes a checkpoint syncs the file.
        self._lock, self._sync_lock = Lock(), Lock()

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write one record. A number that JSON does not have (NaN, infinity) is written as a string."""
        line = _line({"step": step} | {name: _json_value(value) for name, value in values.items()})
        # A resume repeats the verification of its step, whose record the file may have already.
        if line not in self._known:
            with self._lock:
                self._unsynced += line.encode()
                self._write_pending()

    def sync(self) -> None:
        """Wait until all records are on the disk. For any thread.

        Raises:
            OSError: they cannot be written.
        """
        with self._sync_lock:
            try:
                self._sync()
            except OSError as error:
                if error.errno != errno.ESTALE:  # the file server has lost the file
                    raise
                with self._lock:
                    self._open_again()
                self._sync()

    def _sync(self) -> None:
        with self._lock:
            if not self._file.closed:
                if was_replaced(self._file.fileno(), self._file.name):
                    self._open_again()
                self._write_pending()
            if self._fault:
                reason = f"{error_reason(self._fault)}: some records are not written yet"
                raise OSError(self._fault.errno, reason, self._file.name)
            if self._file.closed:
                return
            written, descriptor = self._written, os.dup(self._file.fileno())
        # Without the lock, because a slow disk would hold up `write`, and with it the training.
        try:
            sync_file(descriptor, self._file.name)
        except OSError:
            with self._lock, suppress(OSError):
                # A file server may refuse only now what it has taken: it is removed, and written again later.
                os.ftruncate(descriptor, self._synced_size)
                self._written = 0
            raise
        finally:
            os.close(descriptor)
        with self._lock:
            del self._unsynced[:written]
            self._written -= written
            self._synced_size += written

    def close(self) -> None:
        """Close the file, with a warning if records could not be written."""
        with self._lock:
            self._write_pending()
            if lost := self._pending.count(b"\n"):
                what = count_text(lost, "record is lost, because it", "records are lost, because they")
                warn(f"{self._file.name}: {what} could not be written")
            self._file.close()

    def _open_again(self) -> None:
        """Open the file at the path, for all records since the last sync."""
        lost, path = self._file, Path(self._file.name)
        self._file = path.open("ab", buffering=0)
        with suppress(OSError):
            lost.close()
        size = os.fstat(self._file.fileno()).st_size
        # Of the same file under a new handle, or a copy: it has the records already that were written since then.
        if 0 <= size - self._synced_size <= self._written:
            size = self._file.truncate(self._synced_size)
        self._synced_size, self._written = size, 0

    @property
    def _pending(self) -> bytes:
        return bytes(self._unsynced[self._written :])

    def _write_pending(self) -> None:
        try:
            while pending := self._pending:
                # A disk that fills up takes a part of a record; the rest follows when there is space again.
                self._written += self._file.write(pending)
            self._fault = None
        except OSError as error:
            if self._fault is None:
                warn(
                    f"{self._file.name}: {error_reason(error)}; records are kept in memory and written later"
                )
            self._fault = error


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; see `stream_jsonl`."""
    return list(stream_jsonl(path))


def stream_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, without damaged lines, such as a last line that a crash has cut off.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    with open(path, encoding="utf-8", errors="replace", opener=open_regular) as file:
        for line in file:
            yield from _record_in(line)


class GrowingJsonLines:
    """Reader of a file that is being written: each call yields the records since the last one."""

    def __init__(self, path: Path) -> None:
        """Take a file, which may not exist yet."""
        self._path, self._read = path, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the new records, without damaged lines and without a last line that is not complete yet.

        Raises:
            OSError: the file cannot be read, or is not a regular file.
        """
        if not self._path.is_file():
            return
        with open(self._path, "rb", opener=open_regular) as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                yield from _record_in(line.decode("utf-8", "replace"))


def _record_in(line: str) -> Iterator[dict[str, Any]]:
    """Yield the record of a line, if it has one."""
    with suppress(ValueError):
        record = parse_json(line)
        if isinstance(record, dict) and isinstance(record.get("step"), int) and _fits(record):
            yield record


def _fits(record: dict[str, Any]) -> bool:
    """Return whether all numbers can be floats; in a damaged line one may have hundreds of digits."""
    return all(not isinstance(value, int) or abs(value) < 2**63 for value in record.values())


def _truncate(path: Path, step: int) -> set[str]:
    """Remove the records of later steps and what a resume from this one has changed; return the step's other lines."""
    lines = set()
    # The file of a killed process may end in half a line, which would spoil the first record after it.
    with replacing(path) as scratch, scratch.open("w", encoding="utf-8") as kept:
        for record in stream_jsonl(path):
            is_of_step = record["step"] == step
            if record["step"] > step or (is_of_step and "config_key" in record):
                continue
            kept.write(_line(record))
            if is_of_step:
                lines.add(_line(record))
        # A checkpoint has promised these records: a power cut must not take them.
        kept.flush()
        sync_file(kept.fileno(), path)
    sync_folder(path.parent)
    return lines


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _json_value(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
