"""Sizes in the headers of a Parquet file's pages, read before anything is decoded.

A page of a few bytes can encode two billion equal numbers, and pyarrow decodes a row as a whole. The header of the
page has their number. The metadata at the end of the file may claim another one, and pyarrow ends the process if they
are damaged. The structures are those of parquet.thrift (Apache Parquet format 2.11), in Thrift's compact protocol.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from facetrain.data.positional_file import PositionalFile

_MAGIC = b"PAR1"
_MAX_DEPTH = 24
_HEADER_BYTES = 1 << 16
"""Bytes of the largest page header: those with statistics of long texts have several kB."""
# Types of Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)
# Fields of parquet.thrift.
_ROW_GROUPS, _COLUMNS, _COLUMN_METADATA = 4, 1, 3
_PATH, _CHUNK_VALUES, _CHUNK_BYTES, _DATA_OFFSET, _DICTIONARY_OFFSET = 3, 5, 7, 9, 11
_PAGE_BYTES, _DATA_PAGE, _DATA_PAGE_V2, _NUM_VALUES = 3, 5, 8, 1


def count_values(path: Path, column: str) -> int:
    """Return the number of values that the data pages of a column claim, over all row groups and nested fields.

    Raises:
        DataError: the file cannot be read.
        ValueError: the metadata or a page header is damaged.
    """
    file = PositionalFile(path)
    footer = _read_footer(file)
    count = 0
    for group in _structs(footer, _ROW_GROUPS):
        for chunk in _structs(group, _COLUMNS):
            metadata = chunk.get(_COLUMN_METADATA)
            if not isinstance(metadata, dict):
                raise ValueError("a column without metadata")
            if metadata.get(_CHUNK_VALUES) == 0:  # pyarrow then reads no page
                continue
            path_in_schema = metadata.get(_PATH)
            if isinstance(path_in_schema, list) and path_in_schema[:1] == [column.encode()]:
                count += _count_in_chunk(file, metadata)
    return count


def _read_footer(file: PositionalFile) -> dict[int, Any]:
    tail = file.bytes_at(max(file.size - 8, 0), 8)
    if len(tail) < 8 or tail[4:] != _MAGIC:
        raise ValueError("not a Parquet file")
    size = int.from_bytes(tail[:4], "little")
    if size > file.size - 12:
        raise ValueError(f"metadata of {size:,} bytes in a file of {file.size:,}")
    return _Reader(file.bytes_at(file.size - 8 - size, size)).struct()


def _count_in_chunk(file: PositionalFile, metadata: dict[int, Any]) -> int:
    start, dictionary = _integer(metadata, _DATA_OFFSET), metadata.get(_DICTIONARY_OFFSET)
    if isinstance(dictionary, int) and 0 < dictionary < start:
        start = dictionary
    end = start + _integer(metadata, _CHUNK_BYTES)
    if not 0 <= start <= end <= file.size:
        raise ValueError(f"a column from byte {start:,} to {end:,} in a file of {file.size:,}")
    count = 0
    while start < end:
        reader = _Reader(file.bytes_at(start, min(_HEADER_BYTES, end - start)))
        header = reader.struct()
        for kind in (_DATA_PAGE, _DATA_PAGE_V2):
            if isinstance(header.get(kind), dict):
                count += _integer(header[kind], _NUM_VALUES)
        size = _integer(header, _PAGE_BYTES)
        if size < 0 or count < 0:
            raise ValueError("a page of negative size")
        start += reader.position + size
    return count


def _integer(struct: dict[int, Any], field: int) -> int:
    value = struct.get(field)
    if not isinstance(value, int):
        raise ValueError(f"field {field} of the metadata is missing")
    return value


def _structs(struct: dict[int, Any], field: int) -> list[dict[int, Any]]:
    value = struct.get(field)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError(f"field {field} of the metadata is no list of structures")
    return value


class _Reader:
    """Values of Thrift's compact protocol: structs as {field: value}. Fields of unused types are skipped or kept.

    Raises:
        ValueError: the data ends too early, or has an unknown type.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self.position = data, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Return the struct at the current position."""
        if depth > _MAX_DEPTH:
            raise ValueError("metadata nested too deeply")
        fields: dict[int, Any] = {}
        field = 0
        while (head := self._byte()) != 0:
            # The field number is a difference to the one before, or follows on its own.
            field = field + (head >> 4) if head >> 4 else self._signed()
            fields[field] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind in _INTEGERS:
            return self._signed()
        if kind == _BINARY:
            return self._bytes(self._unsigned())
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_LIST, _SET):
            return self._list(depth + 1)
        if kind in (_BYTE, _DOUBLE):
            return self._bytes(1 if kind == _BYTE else 8)
        raise ValueError(f"unknown type {kind} in the metadata")

    def _list(self, depth: int) -> list[Any]:
        if depth > _MAX_DEPTH:
            raise ValueError("metadata nested too deeply")
        head = self._byte()
        count = head >> 4 if head >> 4 < 15 else self._unsigned()
        if count > len(self._data) - self.position:  # every item has at least a byte
            raise ValueError(f"a list of {count:,} items in the metadata")
        kind = head & 15
        if kind in (_TRUE, _FALSE):
            return [self._byte() == _TRUE for _ in range(count)]
        return [self._value(kind, depth) for _ in range(count)]

    def _byte(self) -> int:
        if self.position >= len(self._data):
            raise ValueError("the metadata end too early")
        self.position += 1
        return self._data[self.position - 1]

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self.position:
            raise ValueError("the metadata end too early")
        self.position += count
        return self._data[self.position - count : self.position]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits in the metadata")

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
