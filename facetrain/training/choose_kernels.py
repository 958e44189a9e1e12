"""Choice between facetrain's kernels and PyTorch's operations for the heads of a run."""

from __future__ import annotations

import torch

from facetrain.device.kernel_launches import power_of_2
from facetrain.distributed import collectives
from facetrain.distributed.process_setup import keep_compiled_code
from facetrain.head.head_group import Head, head_parts
from facetrain.head.partial_fc import PartialFC
from facetrain.head.row_optimizer import CenterUpdate
from facetrain.training.kernel_self_test import CENTERS, KernelWork, difference, results_of_two_steps
from facetrain.training.kernel_verdicts import LIMIT_S, agree_on_kernels
from facetrain.training.state import TrainState


def choose_kernels(state: TrainState, global_batch: int, timeout_s: float) -> None:
    """Let the heads use the kernels that a self-test has verified on this machine. Collective.

    `global_batch` counts the images of the largest micro-batch on all ranks, which wait `timeout_s` in a collective.
    `state.describe_execution` says why the kernels are not used.
    """
    heads = [state.head]
    if state.distillation is not None and state.distillation.centers is not None:
        heads.append(state.distillation.centers)
    # The other ranks wait for the self-test in a collective, which must not time out.
    state.head_remark = choose_head_kernels(
        heads,
        state.world.device,
        global_batch,
        limit_s=min(LIMIT_S, timeout_s / 2),
    )


def choose_head_kernels(
    heads: list[Head], device: torch.device, global_batch: int, *, limit_s: float = LIMIT_S
) -> str:
    """Let heads compute with PyTorch's operations if their kernels are not verified; return why. Collective.

    A self-test in another process, one for each kind of GPU, is followed by a comparison in this one, on every GPU.

    `global_batch` counts the images of the largest micro-batch on all ranks.
    """
    parts = [part.head for head in heads for part in head_parts(head)]
    # A rank without Triton has none, and must take part all the same.
    tested = [head for head in parts if collectives.any_rank(head.uses_kernels)]
    if not tested:
        return ""
    keep_compiled_code()
    reason = _fault(tested, device, global_batch, limit_s)
    if reason:
        for head in tested:
            head.avoid_kernels()
    return reason


def _fault(heads: list[PartialFC], device: torch.device, global_batch: int, limit_s: float) -> str:
    """Return why the kernels of these heads are not used, "" if they are. Collective."""
    # A self-test has all margins, with and without sampling: one for all heads of a mixture. The centers of a teacher
    # may have another size and dtype; if not, the trained head, which is the first, has the kernels of both.
    kinds: dict[tuple[int, torch.dtype], PartialFC] = {}
    for head in heads:
        kinds.setdefault((head.embedding_size, head.weight.dtype), head)
    # The self-tests come first: what ends CUDA in their process must not end it here.
    for head in kinds.values():
        if reason := agree_on_kernels(device, _work_of(head, global_batch), limit_s=limit_s):
            return reason
    return next(filter(None, (difference_on_ranks(head, global_batch) for head in heads)), "")


def _work_of(head: PartialFC, global_batch: int) -> KernelWork:
    update = head.update or CenterUpdate()
    # No chunk has more classes than a rank. Rounded up, so that a verdict holds for heads of other numbers of classes.
    classes = -(-head.num_classes // collectives.world_size(head.group))
    return KernelWork(
        head.embedding_size,
        global_batch,
        min(head.classes_per_chunk(global_batch), power_of_2(classes)),
        head.weight.dtype,
        update.moment_dtype,
        update.momentum,
        update.in_backward,
    )


def difference_on_ranks(head: PartialFC, global_batch: int) -> str:
    """Return on which rank the kernels of a head compute something wrong, "" on none. Collective.

    In the process that trains, with the margin, the update and the dtypes of the head, the sampling of its first stage
    and this batch, on each GPU.
    """
    ranks = collectives.world_size(head.group)
    # A whole chunk and a short one on each rank; never more classes than the head has.
    classes = min(head.num_classes, ranks * (head.classes_per_chunk(global_batch) + 3))
    found = []
    for product_dtype, use_kernels in (
        (None, False),
        (head.product_dtype, False),
        (head.product_dtype, True),
    ):
        small = head.with_classes(classes)
        small.product_dtype = product_dtype
        if use_kernels:
            small.use_kernels()
        found.append(results_of_two_steps(small, global_batch // ranks, seed=collectives.rank(head.group)))
    reasons = collectives.gather_json(difference(*found))
    wrong = [rank for rank, reason in enumerate(reasons) if reason]
    # The centers are the rank's own. The other results are sums over the ranks, and wrong on all of them.
    wrong.sort(key=lambda rank: not reasons[rank].startswith(CENTERS))
    return f"on rank {wrong[0]}, {reasons[wrong[0]]}" if wrong else ""
