"""LMDB databases as HaiyuWu's trainers write them, by the library."""

import struct

import pytest

from tests.support.datasets import encoded_image


def packed(*items):
    """Return a msgpack list of bytes and whole numbers."""
    parts = [b"\xdd" + struct.pack(">I", len(items))]
    for item in items:
        if isinstance(item, bytes):
            parts.append(b"\xc6" + struct.pack(">I", len(item)) + item)
        else:
            parts.append(b"\xce" + struct.pack(">I", item))
    return b"".join(parts)


def trainer_values(labels):
    """Return the values of a database of images with these labels, by their keys."""
    keys = [str(n).encode() for n in range(len(labels))]
    values = {key: packed(encoded_image(n), labels[n]) for n, key in enumerate(keys)}
    return values | {b"__keys__": packed(*keys), b"__len__": b"\x02", b"__classnum__": b"\x03"}


def write_lmdb(path, values, *, is_folder=False):
    """Write a database, and return its path."""
    lmdb = pytest.importorskip("lmdb")
    with (
        lmdb.open(str(path), map_size=1 << 24, subdir=is_folder) as database,
        database.begin(write=True) as transaction,
    ):
        for key, value in values.items():
            transaction.put(key, value)
    return path
