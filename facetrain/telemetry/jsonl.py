"""metrics.jsonl: one JSON object a line, for programs."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from facetrain.telemetry.log import warn


class JsonLines:
    """Append records to a file. What a full disk does not take is kept, and written when there is room again."""

    def __init__(self, path: Path, *, resume_at: int | None = None) -> None:
        """Open for appending. With `resume_at`, forget what was recorded of later steps: they come again.

        A record of that very step is not written twice.
        """
        self._already: set[bytes] = set()
        if resume_at is None:
            path.unlink(missing_ok=True)
        elif path.exists():
            self._already = _keep_until(path, resume_at)
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._is_refused = False

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write one record. A number that JSON cannot hold (NaN, infinity) is written as a string."""
        record = {"step": step} | {name: _plain(value) for name, value in values.items()}
        line = _line(record)
        if line not in self._already:
            self._waiting += line
            self._write_out()

    def close(self) -> None:
        """Close the file."""
        self._write_out()
        self._file.close()

    def _write_out(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not self._is_refused:
                warn(f"{self._file.name}: {error.strerror}; records are kept until they can be written")
        self._is_refused = bool(self._waiting)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, leaving out a last line that a crash has cut."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _keep_until(path: Path, step: int) -> set[bytes]:
    """Forget later records, and return the lines of the step itself."""
    kept = [record for record in read_jsonl(path) if record.get("step", 0) <= step]
    scratch = path.with_suffix(".tmp")
    with scratch.open("wb") as file:
        file.writelines(map(_line, kept))
        file.flush()
        os.fsync(file.fileno())  # a machine that goes down now must not leave an empty file under the name
    os.replace(scratch, path)
    return {_line(record) for record in kept if record.get("step", 0) == step}


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record) + "\n").encode()


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
