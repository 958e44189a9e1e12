"""Values of LMDB trainers: (encoded image, label) in msgpack.

Only the places of the image and the label are found; the image itself is not read. Of the msgpack specification, the
families bin, str, int and array are understood.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

Read = Callable[[int, int], bytes]
"""Function that returns `count` bytes from a position of the value on; fewer at its end."""
_HEAD_BYTES = 9


class Item(NamedTuple):
    """Item of a msgpack list: bytes from `start` to `end`, or a whole number."""

    start: int
    end: int
    number: int | None


def image_and_label(read: Read, size: int) -> tuple[int, int, int]:
    """Return the start and the end of the image in a value of `size` bytes, and the label.

    Raises:
        ValueError: the value is not a pair of bytes and a whole number.
    """
    items = list(list_items(read, size, most=2))
    images = [item for item in items if item.number is None]
    labels = [item.number for item in items if item.number is not None]
    if (len(images), len(labels)) != (1, 1):
        raise ValueError(f"{len(images)} byte strings and {len(labels)} whole numbers; expected one of each")
    return images[0].start, images[0].end, labels[0]


def list_items(read: Read, size: int, *, most: int) -> Iterator[Item]:
    """Yield the items of a msgpack list, at most `most`.

    Raises:
        ValueError: the value is not a list of byte strings, texts and whole numbers.
    """
    head = read(0, 5).ljust(5, b"\0")
    # Family of the first byte: the layout of the number of items, and the bytes before the first item.
    layout, position = {0xDC: (">H", 3), 0xDD: (">I", 5)}.get(head[0], ("", 1))
    if not layout and head[0] >> 4 != 0x9:
        raise ValueError("not a list in msgpack")
    count = struct.unpack_from(layout, head, 1)[0] if layout else head[0] & 0x0F
    if count > most or count > size:
        raise ValueError(f"a list of {count:,} items; expected {min(most, size):,}")
    for _ in range(count):
        item = item_at(read, position)
        if item.end > size:
            raise ValueError("an item is longer than the value")
        yield item
        position = item.end


def item_at(read: Read, position: int) -> Item:
    """Return the byte string or the whole number that begins at a position of a msgpack value.

    Raises:
        ValueError: another type, or a cut value.
    """
    head = read(position, _HEAD_BYTES)
    kind = head[0] if head else 0xC1
    if kind <= 0x7F:
        return Item(position, position + 1, kind)
    if 0xA0 <= kind <= 0xBF:  # a short text; old writers stored bytes as text
        return Item(position + 1, position + 1 + (kind & 0x1F), None)
    lengths = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
    numbers = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
    layout = lengths.get(kind) or numbers.get(kind)
    if layout is None or len(head) < 1 + struct.calcsize(layout):
        raise ValueError(f"type 0x{kind:02x} of msgpack; expected bytes or a whole number")
    value, start = struct.unpack_from(layout, head, 1)[0], position + 1 + struct.calcsize(layout)
    return Item(start, start + value, None) if kind in lengths else Item(position, start, value)
