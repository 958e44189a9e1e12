"""tf.Example messages: the features of a record, found without TensorFlow and without copying their values.

Messages and field numbers: tensorflow/core/example/example.proto and feature.proto; wire format: Protocol Buffers,
"Encoding".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

Read = Callable[[int, int], bytes]
"""Function that returns `count` bytes from a position of the message on; fewer at its end."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_FLOAT = struct.Struct("<f")
_HEAD_BYTES = 20
"""Bytes of two varints: a tag and a length or value."""
_MAX_FIELDS = 1000
"""Fields of all levels that are read of one message; more would be no image and its label."""


class Feature(NamedTuple):
    """First value of a feature: a byte string from `start` to `end`, or a number."""

    start: int
    end: int
    number: int | float | None


class _Field(NamedTuple):
    tag: int
    start: int
    end: int
    value: int | None
    """Value of a varint; None for other types."""


def read_features(read: Read, size: int) -> dict[str, Feature | None]:
    """Return the features of an Example of `size` bytes by name; None for one without a value.

    Raises:
        ValueError: the message is damaged.
    """
    message, features = _Message(read, size), dict[str, Feature | None]()
    for example in message.fields(0, size, wanted=1):
        for entry in message.fields(example.start, example.end, wanted=1):
            name, feature = "", None
            for part in message.fields(entry.start, entry.end):
                if part.tag == 1:
                    name = message.text(part)
                elif part.tag == 2:
                    feature = message.first_value(part)
            features[name] = feature
    return features


class _Message:
    """Fields of a message that is read in small pieces: images are skipped, not read."""

    def __init__(self, read: Read, size: int) -> None:
        self._read, self._size, self._fields = read, size, 0

    def fields(self, start: int, end: int, *, wanted: int | None = None) -> Iterator[_Field]:
        """Yield the fields of a part of the message, or only the fields with one number."""
        while start < end:
            self._fields += 1
            if self._fields > _MAX_FIELDS:
                raise ValueError(f"more than {_MAX_FIELDS:,} fields")
            head = self._read(start, _HEAD_BYTES)
            tag, used = _varint(head, 0)
            kind, value = tag & 7, None
            if kind == _VARINT:
                value, used = _varint(head, used)
                length = 0
            elif kind == _BYTES:
                length, used = _varint(head, used)
            elif kind in (_FIXED64, _FIXED32):
                length = 8 if kind == _FIXED64 else 4
            else:
                raise ValueError(f"wire type {kind}")
            field = _Field(tag >> 3, start + used, start + used + length, value)
            if field.end > end:
                raise ValueError("a field is longer than its message")
            if wanted is None or field.tag == wanted:
                yield field
            start = field.end

    def text(self, field: _Field) -> str:
        """Return a field of at most a few hundred bytes as text."""
        return self._read(field.start, min(field.end - field.start, 256)).decode("utf-8", "replace")

    def first_value(self, feature: _Field) -> Feature | None:
        """Return the first value of a Feature message."""
        for values in self.fields(feature.start, feature.end):
            for value in self.fields(values.start, values.end, wanted=1):
                if values.tag == _BYTES_LIST and value.value is None:
                    return Feature(value.start, value.end, None)
                if value.value is None and value.start == value.end:
                    break
                if values.tag == _FLOAT_LIST:
                    head = self._read(value.start, _FLOAT.size)
                    if len(head) < _FLOAT.size or value.value is not None:
                        raise ValueError("a number is cut off")
                    return Feature(value.start, value.end, _FLOAT.unpack(head)[0])
                if values.tag == _INT64_LIST:
                    # Packed, as all current writers do, or one varint per field.
                    head = self._read(value.start, _HEAD_BYTES) if value.value is None else b""
                    number = _varint(head, 0)[0] if value.value is None else value.value
                    return Feature(value.start, value.end, number - (1 << 64) if number >> 63 else number)
                break
        return None


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number is cut off")
