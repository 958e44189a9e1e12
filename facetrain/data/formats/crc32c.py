"""CRC-32C (Castagnoli) of records: `google-crc32c` if it is installed, otherwise with NumPy.

A CRC is linear over XOR: the CRC of a message is the XOR of the CRCs of its bytes, each followed by zeros. So a table
with one row per position in a block gives the CRCs of all blocks of a message at once; a second table combines them.
"""

from __future__ import annotations

from functools import cache

import numpy as np

try:
    import google_crc32c
except ImportError:
    google_crc32c = None

_POLYNOMIAL = 0x82F63B78
_BLOCK = 64
_BLOCKS = 1 << 10
"""Blocks that the second table can combine; longer messages are processed in parts of this size."""
_MASK_DELTA = 0xA282EAD8


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of bytes."""
    if google_crc32c is not None:
        return int(google_crc32c.value(data))
    return crc32c_numpy(data)


def masked_crc32c(data: bytes) -> int:
    """Return the CRC-32C as TFRecord stores it: rotated by 15 bits, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def crc32c_numpy(data: bytes) -> int:
    """Return the CRC-32C of bytes, computed with NumPy."""
    register, part = 0xFFFFFFFF, _BLOCK * _BLOCKS
    for start in range(0, len(data), part):
        register = _update(register, data[start : start + part])
    return register ^ 0xFFFFFFFF


def _update(register: int, data: bytes) -> int:
    """Return the register after a part of the message."""
    if len(data) < _BLOCK:
        table = _byte_table().tolist()
        for byte in data:
            register = table[(register ^ byte) & 0xFF] ^ register >> 8
        return register
    blocks = -(-len(data) // _BLOCK)
    # Zeros at the front do not change a register of zero; the register itself is added to the first four bytes.
    padded = np.zeros(blocks * _BLOCK, np.uint8)
    first = len(padded) - len(data)
    padded[first:] = np.frombuffer(data, np.uint8)
    padded[first : first + 4] ^= np.frombuffer(register.to_bytes(4, "little"), np.uint8)
    in_block, shifts = _tables()
    row: np.ndarray = padded.reshape(blocks, _BLOCK) + np.arange(0, _BLOCK * 256, 256, dtype=np.uint16)
    crc = np.bitwise_xor.reduce(in_block.take(row), axis=1)
    columns: np.ndarray = crc.astype("<u4").view(np.uint8).reshape(blocks, 4) + np.arange(0, 1024, 256)
    columns += np.arange((blocks - 1) * 1024, -1, -1024)[:, None]
    return int(np.bitwise_xor.reduce(shifts.take(columns), axis=None))


@cache
def _byte_table() -> np.ndarray:
    """Return the CRC of each byte from a register of zero: uint32 (256,)."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, np.uint32(_POLYNOMIAL) ^ table >> 1, table >> 1)
    return table


@cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Return both tables, flat.

    The first has the CRC of byte b at position i of a block, uint32 (64, 256); the second that of byte b of the
    register at byte j, followed by k blocks of zeros, uint32 (1024, 4, 256).
    """
    one = _byte_table()
    in_block = np.empty((_BLOCK, 256), np.uint32)
    in_block[-1] = one
    for position in range(_BLOCK - 2, -1, -1):
        after = in_block[position + 1]
        in_block[position] = one[after & 0xFF] ^ after >> 8
    shifts = np.empty((_BLOCKS, 4, 256), np.uint32)
    shifts[0] = np.arange(256, dtype=np.uint32) << np.array([[0], [8], [16], [24]], np.uint32)
    for number in range(1, _BLOCKS):
        # A register of four bytes, then 60 zeros: the bytes are the first four of a block.
        before = shifts[number - 1]
        shifts[number] = (
            in_block[0][before & 0xFF]
            ^ in_block[1][before >> 8 & 0xFF]
            ^ in_block[2][before >> 16 & 0xFF]
            ^ in_block[3][before >> 24]
        )
    return in_block.reshape(-1), shifts.reshape(-1)
