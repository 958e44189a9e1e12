"""Units and constants of memory, and the remembered results of counted steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

GIB = 1 << 30
"""Bytes of a GiB."""
GPU_GIB = {"v100": 32, "a100": 80, "h100": 80, "h200": 141}
"""Memory of one GPU in GiB by its kind, from the vendor's data sheets of the SXM variants."""
CONTEXT_BYTES = 600 << 20
"""CUDA context, kernels and workspaces of the libraries, on each GPU: an assumption."""
NCCL_BYTES = 300 << 20
"""NCCL's buffers, on each of several GPUs: an assumption."""
PROCESS_BYTES = 588 << 20
"""A training process on a CPU: Python, torch without CUDA, and its kernels; Linux x86-64, torch 2.13."""


def line_through(first: int, bytes_first: int, second: int, bytes_second: int) -> Callable[[int], int]:
    """Return the bytes as a function of a count, from two counted steps: tensors grow in proportion to it."""
    per_unit = (bytes_second - bytes_first) / (second - first)
    return lambda count: round(bytes_first + per_unit * (count - first))


def remembered(function: Callable[P, T]) -> Callable[P, T]:
    """Remember the results of a function by the text of its arguments: settings with a dict have no hash.

    A search for the largest batch counts the same network again and again.
    """
    results: dict[str, T] = {}

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        key = repr((args, options))
        if key not in results:
            results[key] = function(*args, **options)
        return results[key]

    return call
