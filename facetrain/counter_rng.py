"""Counter-based random numbers: pure functions of a key and a counter, without state, on any device.

The numbers of a generator depend on how many were drawn before. These depend on a key and a counter only, so an
image gets the same augmentation, and a step the same classes, for any number of ranks, workers or restarts. Importing
this module does not import torch, which the dataset tools do without.
"""

from __future__ import annotations

from enum import IntEnum, unique
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


@unique
class Stream(IntEnum):
    """Purposes of random numbers in a run, by which `key_of` derives their keys from `config.seed`.

    The sampler derives the key of a shuffle from the epoch: that of epoch 3 is the key of the augmentation.
    """

    AUGMENTATION = 3
    CENTERS = 5
    MARGINS = 6
    PROJECTION = 7
    TEACHER_CENTERS = 8
    TEACHER_MARGINS = 9
    TORCH = 10


def key_of(*parts: int) -> int:
    """Combine integers (such as a seed, an epoch, a purpose) into one 64-bit key."""
    key = 0
    for part in parts:
        key = _mix_int((key ^ (part & _MASK)) + _GOLDEN)
    return key


def hash64(counter: Tensor, key: int) -> Tensor:
    """Hash each integer with a key: int64 (...) -> int64 (...), all 64 bits random.

    The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014),
    applied twice, with the key added between by XOR.
    """
    return _mix(_mix(counter + _signed(_GOLDEN)) ^ _signed(key))


def uniform(counter: Tensor, key: int) -> Tensor:
    """Return uniform numbers in [0, 1), float64, one for each counter (int64)."""
    return _shift_right(hash64(counter, key), 11).double() * 2.0**-53


def uniform_array(counter: np.ndarray, key: int) -> np.ndarray:
    """Return the numbers of `uniform` for an array, int64 (...) -> float64 (...)."""
    mixed = mix_array(counter.astype(np.int64).view(np.uint64) + np.uint64(_GOLDEN))
    return (mix_array(mixed ^ np.uint64(key & _MASK)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(counter: Tensor, key: int) -> Tensor:
    """Return standard normal numbers, float64, one for each counter (int64).

    They are computed by the inverse of the distribution function, which needs one uniform number each.
    """
    import torch

    # The middle of one of 2^52 intervals: never 0 or 1, where the inverse is infinite.
    middle = (_shift_right(hash64(counter, key), 12).double() + 0.5) * 2.0**-52
    return torch.special.ndtri(middle)


def mix_array(z: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64: uint64 (...) -> uint64 (...).

    NumPy, not torch: `hash64` takes five times as long for the indices of one batch.
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_2)
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    # torch has no unsigned 64-bit arithmetic: its shift copies the sign bit, and the mask removes the copies.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix_int(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
