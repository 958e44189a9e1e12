"""Choice between facetrain's kernels and PyTorch's operations for the heads of a run."""

from __future__ import annotations

import torch

from facetrain.distributed import collectives
from facetrain.head.head_group import Head, head_parts
from facetrain.head.row_optimizer import CenterUpdate
from facetrain.training.kernel_self_test import KernelWork
from facetrain.training.kernel_verdicts import LIMIT_S, agree_on_kernels
from facetrain.training.settings import TrainSettings
from facetrain.training.state import TrainState


def choose_kernels(state: TrainState, train: TrainSettings) -> None:
    """Let the heads use the kernels that a self-test has verified on this machine. Collective.

    `state.describe_execution` says why they are not used.
    """
    heads = [state.head]
    if state.distillation is not None and state.distillation.centers is not None:
        heads.append(state.distillation.centers)
    # The other ranks wait for the self-test in a collective, which must not time out.
    state.head_remark = choose_head_kernels(
        heads,
        state.world.device,
        train.global_batch_size or (train.batch_size or 128) * state.world.size,
        limit_s=min(LIMIT_S, train.timeout_s / 2),
    )


def choose_head_kernels(
    heads: list[Head], device: torch.device, global_batch: int, *, limit_s: float = LIMIT_S
) -> str:
    """Let heads compute with PyTorch's operations if their kernels are not verified; return why. Collective.

    `global_batch` counts the images of a micro-batch on all ranks.
    """
    parts = [part.head for head in heads for part in head_parts(head)]
    # A rank without Triton has none, and must take part all the same.
    if not collectives.any_rank(any(head.uses_kernels for head in parts)):
        return ""
    # The first one is trained. The others are of the same kind, or the fixed centers of a teacher.
    head = parts[0]
    update = head.update or CenterUpdate()
    work = KernelWork(
        torch.bfloat16,
        head.embedding_size,
        global_batch,
        head.classes_per_chunk(global_batch),
        head.weight.dtype,
        update.moment_dtype,
        update.momentum,
        update.in_backward,
    )
    reason = agree_on_kernels(device, work, limit_s=limit_s)
    if reason:
        for head in parts:
            head.avoid_kernels()
    return reason
