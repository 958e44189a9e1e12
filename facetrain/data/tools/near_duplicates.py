"""Equal images, found by a hash of their bytes, and near-duplicates, found by a perceptual hash."""

from __future__ import annotations

import hashlib

import cv2
import numpy as np

HASH_SIDE = 16
HASH_WORDS = HASH_SIDE * HASH_SIDE // 32
MAX_DISTANCE = 20
"""Differing bits, of 256, up to which two images are near-duplicates.

Measured on LFW: the closest photographs of 800 different people differ in 51 bits. A photograph and a copy differ in
at most 12 bits for 99 % of copies saved at JPEG quality 30, 5 bits for copies reduced by a third and enlarged again,
and 18 bits for copies that are brighter by a sixth.
"""
_NEIGHBORS = 8
_ROWS_PER_CHUNK = 1 << 16


def digest(data: bytes) -> np.uint64:
    """Hash bytes to 64 bits (BLAKE2b). Among 42 million values, a collision has a probability of 5e-5."""
    return np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint64)[0]


def perceptual_hash(image: np.ndarray) -> np.ndarray:
    """Return the signs of the 16 × 16 lowest DCT frequencies of uint8 RGB (H, W, 3): uint32 (8,)."""
    gray = cv2.resize(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), (32, 32), interpolation=cv2.INTER_AREA)
    low = cv2.dct(gray.astype(np.float32))[:HASH_SIDE, :HASH_SIDE]
    low[0, 0] = 0  # the mean brightness, whose sign carries no information
    return np.packbits(low > 0).view(np.uint32)


def equal_groups(key: np.ndarray) -> list[np.ndarray]:
    """Return the ascending rows of each value that occurs more than once in (N,)."""
    order = np.argsort(key, kind="stable")
    edges = np.flatnonzero(np.diff(key[order])) + 1
    starts, stops = np.append(0, edges), np.append(edges, len(key))
    return [order[start:stop] for start, stop in zip(starts, stops, strict=True) if stop - start > 1]


def near_pairs(hash_N8: np.ndarray, max_distance: int = MAX_DISTANCE) -> np.ndarray:
    """Return pairs of rows of uint32 (N, 8) that differ in at most `max_distance` bits: int64 (pairs, 2).

    An approximate search in O(N log N) time: the rows are sorted eight times, by each word first, and compared with
    their next eight neighbors. It misses a pair if the two rows are farther apart in all eight orders, which is rare
    below 8 differing bits and happens for about one pair of seven at 12.
    """
    found = [np.empty((0, 2), np.int64)]
    for first in range(HASH_WORDS):
        words = [(first + number) % HASH_WORDS for number in range(HASH_WORDS)]
        order = np.lexsort([hash_N8[:, word] for word in reversed(words)])
        # In chunks: the hashes of all rows and of their neighbors would be five times as large as the hashes.
        for start in range(0, len(order), _ROWS_PER_CHUNK):
            chunk = order[start : start + _ROWS_PER_CHUNK + _NEIGHBORS]
            for step in range(1, min(_NEIGHBORS, len(chunk) - 1) + 1):
                one, other = chunk[:-step][:_ROWS_PER_CHUNK], chunk[step:][:_ROWS_PER_CHUNK]
                distance = np.bitwise_count(hash_N8[one] ^ hash_N8[other]).sum(1)
                near = distance <= max_distance
                found.append(np.sort(np.stack([one[near], other[near]], 1), axis=1))
    return np.unique(np.concatenate(found), axis=0)
