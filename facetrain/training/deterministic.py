"""Deterministic training on a GPU: two runs, and a run and its continuation, are equal bit for bit.

The sources of different bits on a GPU, and what removes them:

- Sums with atomic operations, whose order changes from run to run. facetrain's Triton kernels have none. torch's
  `index_add_` (in `head/`) has them on a GPU; `torch.use_deterministic_algorithms` replaces it by a sort and sums in a
  fixed order. Where torch has no such algorithm, it raises an error.
- cuDNN: its algorithms with atomic operations are excluded, and it does not choose by measuring.
- DDP's buckets, whose order changes after the first step of a process: with three or more ranks each gradient is
  averaged by itself (`distributed.ddp.average_each_gradient`).
- cuBLAS: a workspace that is shared by streams (`distributed.process_setup.fix_cublas_workspace`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic


@contextmanager
def deterministic_algorithms(enabled: bool = True) -> Iterator[None]:
    """Use only deterministic algorithms for the duration of the context; do nothing if it is not enabled."""
    if not enabled:
        yield
        return
    cudnn = torch.backends.cudnn
    memory: Any = torch.utils.deterministic  # its attribute is defined in a way that mypy does not see
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
        memory.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    # torch would fill each new tensor with NaN, which costs a pass over every activation. No result depends on memory
    # that was not written: the runs of the tests are equal bit for bit.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = before[2:]
