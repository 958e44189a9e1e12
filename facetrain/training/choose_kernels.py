"""Choice between facetrain's kernels and PyTorch's operations, for the trunk and for the heads of a run."""

from __future__ import annotations

import torch

from facetrain.distributed import collectives
from facetrain.head.head_group import Head, head_parts
from facetrain.training.fused_trunk import choose_trunk
from facetrain.training.kernel_verdicts import agree_on_kernels
from facetrain.training.state import TrainState


def choose_kernels(state: TrainState, fused: str, *, checkpoint_activations: bool) -> None:
    """Let trunk and heads use the kernels that a self-test has verified on this machine. Collective.

    `state.describe_execution` says what was chosen, and why; the arguments and errors are `choose_trunk`'s.
    """
    choose_trunk(state.network, fused, checkpoint_activations=checkpoint_activations)
    heads = [state.head]
    if state.distillation is not None and state.distillation.centers is not None:
        heads.append(state.distillation.centers)
    state.head_remark = choose_head_kernels(heads, state.world.device)


def choose_head_kernels(heads: list[Head], device: torch.device) -> str:
    """Let heads compute with PyTorch's operations if their kernels are not verified; return why. Collective."""
    parts = [part.head for head in heads for part in head_parts(head)]
    # A rank without Triton has none, and must take part all the same.
    if not collectives.any_rank(any(head.uses_kernels for head in parts)):
        return ""
    reason = agree_on_kernels("head", device, torch.bfloat16)
    if reason:
        for head in parts:
            head.avoid_kernels()
    return reason
