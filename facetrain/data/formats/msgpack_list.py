"""Lists in msgpack, of which only the places of the items are found.

Of the msgpack specification, the families array, bin, str and int are understood. Old writers stored bytes as texts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_LISTS = {0xDC: ">H", 0xDD: ">I"}
_BYTES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_NUMBERS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}


class Item(NamedTuple):
    """Item of a list: bytes from `start` to `end` of the text, or a whole number."""

    start: int
    end: int
    number: int | None


def list_items(text: memoryview) -> Iterator[Item]:
    """Yield the items of a list.

    Raises:
        ValueError: the text is not a list of byte strings, texts and whole numbers.
    """
    try:
        count, position = _sized(text, 0, _LISTS, short=0x90)
        for _ in range(count):
            item = _item_at(text, position)
            yield item
            position = item.end
    except (struct.error, IndexError):
        raise ValueError("an item is longer than the value") from None


def _item_at(text: memoryview, position: int) -> Item:
    kind = text[position]
    if kind <= 0x7F:
        return Item(position, position + 1, kind)
    if kind in _NUMBERS:
        layout = _NUMBERS[kind]
        end = position + 1 + struct.calcsize(layout)
        return Item(position, end, struct.unpack_from(layout, text, position + 1)[0])
    size, start = _sized(text, position, _BYTES, short=0xA0)
    if start + size > len(text):
        raise IndexError
    return Item(start, start + size, None)


def _sized(text: memoryview, position: int, layouts: dict[int, str], *, short: int) -> tuple[int, int]:
    """Return the number that the head of a list or of bytes has, and the position after the head."""
    kind = text[position]
    if layout := layouts.get(kind):
        return struct.unpack_from(layout, text, position + 1)[0], position + 1 + struct.calcsize(layout)
    mask = 0x0F if short == 0x90 else 0x1F
    if kind & ~mask != short:
        raise ValueError(f"type 0x{kind:02x} of msgpack is not understood here")
    return kind & mask, position + 1
