"""Pages of an LMDB database, read without the library: it trusts every page number and crashes on a damaged file.

Layout: LMDB 0.9, lmdb.h and mdb.c (MDB_page, MDB_node, MDB_meta, MDB_db), little-endian with 64-bit page numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from facetrain.data.positional_file import PositionalFile
from facetrain.errors import DataError

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META = struct.Struct("<16xII8x8xIHH40xIHH4QQQQ")
_PAGE = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_BRANCH, _LEAF, _OVERFLOW, _LEAF2 = 1, 2, 4, 0x20
_BIG_VALUE, _SUB_DATABASE, _DUPLICATES = 1, 2, 4
_NO_ROOT = (1 << 64) - 1
_MAX_DEPTH = 32


class Value(NamedTuple):
    """Key of a database, and the places of the key and of its value in the file."""

    key: bytes
    key_offset: int
    offset: int
    size: int


class LmdbFile(PositionalFile):
    """Database file: NAME.lmdb, or data.mdb in a folder.

    Raises:
        DataError: the file is not an LMDB database.
    """

    def values(self) -> Iterator[Value]:
        """Yield all keys in their sorted order.

        Raises:
            DataError: a page is damaged.
        """
        page_bytes, root = self._newest_root()
        if root == _NO_ROOT:
            return
        pages = self.size // page_bytes
        pending, visited = [(root, 0)], 0
        while pending:
            number, depth = pending.pop()
            visited += 1
            if number >= pages or depth > _MAX_DEPTH or visited > pages:
                raise self._damaged(number * page_bytes)
            page = self.bytes_at(number * page_bytes, page_bytes)
            flags = _PAGE.unpack_from(page)[2]
            if flags & _BRANCH:
                children = [
                    low | high << 16 | top << 32
                    for _, low, high, top, _ in self._nodes(page, number * page_bytes)
                ]
                pending += ((child, depth + 1) for child in reversed(children))
            elif flags & _LEAF and not flags & _LEAF2:
                yield from self._leaf_values(page, number * page_bytes)
            else:
                raise self._damaged(number * page_bytes)

    def _newest_root(self) -> tuple[int, int]:
        """Return the page size, and the root page of the newest complete transaction."""
        first = self._meta(0)
        page_bytes = first[1]
        if not 512 <= page_bytes <= 1 << 16 or page_bytes & (page_bytes - 1):
            raise self._damaged(0)
        _, _, flags, root = max(first, self._meta(page_bytes))
        if flags & _DUPLICATES:
            raise DataError(f"{self.path}: a database with several values per key is not supported")
        return page_bytes, root

    def _meta(self, offset: int) -> tuple[int, int, int, int]:
        """Return the number of the transaction, the page size, and flags and root of the main database."""
        data = self.bytes_at(offset, _META.size).ljust(_META.size, b"\0")
        magic, version, page_bytes, _, _, _, flags, _, *_, root, _, transaction = _META.unpack(data)
        if (magic, version) != (_MAGIC, _VERSION):
            raise DataError(
                f"{self.path}: not an LMDB database of version {_VERSION}, or damaged at byte {offset:,}"
            )
        return transaction, page_bytes, flags, root

    def _nodes(self, page: bytes, offset: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield the position of each node in a page and the four numbers of its header."""
        count = (_PAGE.unpack_from(page)[3] - _PAGE.size) // 2
        if count < 0 or _PAGE.size + 2 * count > len(page):
            raise self._damaged(offset)
        used = 0
        for place in struct.unpack_from(f"<{count}H", page, _PAGE.size):
            if place + _NODE.size > len(page):
                raise self._damaged(offset)
            low, high, flags, key_size = _NODE.unpack_from(page, place)
            used += _NODE.size + key_size
            # Nodes do not overlap: else a small file could have a huge number of keys.
            if place + _NODE.size + key_size > len(page) or used > len(page):
                raise self._damaged(offset)
            yield place, low, high, flags, key_size

    def _leaf_values(self, page: bytes, offset: int) -> Iterator[Value]:
        for place, low, high, flags, key_size in self._nodes(page, offset):
            start = place + _NODE.size
            value, size = offset + start + key_size, low | high << 16
            if flags & (_SUB_DATABASE | _DUPLICATES):
                continue
            if flags & _BIG_VALUE:
                if start + key_size + 8 > len(page):
                    raise self._damaged(offset)
                value = struct.unpack_from("<Q", page, start + key_size)[0] * len(page) + _PAGE.size
            if value + size > self.size:
                raise DataError(
                    f"{self.path}: the value at byte {value:,} is past the end of the file; the database is "
                    "truncated: copy it again"
                )
            yield Value(page[start : start + key_size], offset + start, value, size)

    def _damaged(self, offset: int) -> DataError:
        return DataError(f"{self.path}: the page at byte {offset:,} is damaged; copy the database again")
