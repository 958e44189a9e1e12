"""Launch of facetrain's Triton kernels."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on a grid of programs; tests without a GPU replace this function."""
    kernel[grid](*arguments, **options)


# `triton.cdiv` and `triton.next_power_of_2` may run in a kernel, too, and therefore cost the host 15 µs a call.
def ceil_divide(number: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // divisor)


def power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is not below a number from 1 on."""
    return 1 << (number - 1).bit_length()
