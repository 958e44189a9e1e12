"""Choice between facetrain's kernels and PyTorch's operations, for the trunk and for the heads of a run."""

from __future__ import annotations

import torch

from facetrain.backbone.iresnet import IResNet
from facetrain.distributed import collectives
from facetrain.distributed.sync_batch_norm import has_sync_batch_norm
from facetrain.errors import ConfigError
from facetrain.head.head_group import Head, head_parts
from facetrain.optim.frozen_parts import has_frozen_batch_norm
from facetrain.training.kernel_verdicts import LIMIT_S, agree_on_kernels
from facetrain.training.precision import InPrecision
from facetrain.training.settings import TrainSettings
from facetrain.training.state import TrainState
from facetrain.training.trunk_comparison import trunk_difference

_COMPARED_SHARE = 4
"""One in so many images of a micro-batch is compared: the plain trunk keeps twice as many activations, and in float32
each has twice the bytes, so the comparison needs no more memory than the step."""


def choose_kernels(state: TrainState, train: TrainSettings, *, checkpoint_activations: bool) -> None:
    """Let trunk and heads use the kernels that a self-test has verified on this machine. Collective.

    `state.describe_execution` says what was chosen, and why; errors are `choose_trunk`'s.
    """
    # The other ranks wait for the self-test in a collective, which must not time out.
    limit_s = min(LIMIT_S, train.timeout_s / 2)
    choose_trunk(state.network, train.fused, checkpoint_activations=checkpoint_activations, limit_s=limit_s)
    heads = [state.head]
    if state.distillation is not None and state.distillation.centers is not None:
        heads.append(state.distillation.centers)
    state.head_remark = choose_head_kernels(heads, state.world.device, limit_s=limit_s)


def choose_head_kernels(heads: list[Head], device: torch.device, *, limit_s: float = LIMIT_S) -> str:
    """Let heads compute with PyTorch's operations if their kernels are not verified; return why. Collective."""
    parts = [part.head for head in heads for part in head_parts(head)]
    # A rank without Triton has none, and must take part all the same.
    if not collectives.any_rank(any(head.uses_kernels for head in parts)):
        return ""
    reason = agree_on_kernels("head", device, torch.bfloat16, limit_s=limit_s)
    if reason:
        for head in parts:
            head.avoid_kernels()
    return reason


def choose_trunk(
    network: InPrecision, fused: str, *, checkpoint_activations: bool, limit_s: float = LIMIT_S
) -> None:
    """Let the training steps of a network run on the fused trunk if `fused` asks for it and it works. Collective.

    `network.remark` says why it is the plain one.

    Args:
        network: the network on its device, its batch norms synchronized already if they are to be.
        fused: value of `train.fused`.
        checkpoint_activations: whether blocks are recomputed as a whole in the backward pass.
        limit_s: time for the self-test.

    Raises:
        ConfigError: `fused` is `on`, and other keys of the config exclude the fused trunk.
    """
    if fused == "off":
        return
    reason = why_not_fused(network, checkpoint_activations)
    if reason and fused == "on":
        raise ConfigError(f"train.fused: on is not possible: {reason}; set it to off")
    if not reason:
        assert network.dtype is not None
        # Last, because it takes most of a minute on a machine that has no verdict yet.
        reason = agree_on_kernels("trunk", network.device, network.dtype, limit_s=limit_s)
    if reason:
        network.remark = f"train.fused: {fused} has no effect: {reason}"
        return
    from facetrain.backbone.fused_iresnet import FusedTrunk

    assert isinstance(network.backbone, IResNet)
    network.fused_trunk = FusedTrunk(network.backbone)


def why_not_fused(network: InPrecision, checkpoint_activations: bool) -> str:
    """Return why a config excludes the fused trunk, "" if it does not."""
    backbone = network.backbone
    subsamples = isinstance(backbone, IResNet) and backbone.subsample_shortcut
    is_nchw = network.memory_format != torch.channels_last
    fixed = "model.freeze, model.lora or model.train_batch_norm fixes"
    reasons = (
        (not isinstance(backbone, IResNet), "only r18 to r2060 and iresnet have a fused trunk"),
        (subsamples, "the fused blocks have a convolution in every shortcut, and ir18 to ir101 do not"),
        (network.dtype is None, "train.precision is fp32, and the kernels are for bf16 and fp16"),
        (is_nchw, "the kernels read the channels_last layout, and train.channels_last is false"),
        (network.compile_mode != "off", "train.compile compiles the same blocks"),
        (checkpoint_activations, "model.checkpoint_activations recomputes the same blocks"),
        (
            has_sync_batch_norm(backbone),
            "the kernels use the statistics of one rank, not of all (batch_norm: sync)",
        ),
        (has_frozen_batch_norm(backbone), f"the kernels use the statistics of each batch, and {fixed} them"),
    )
    # One reason, the first of the list: a user who removes it sees the next.
    return next((reason for applies, reason in reasons if applies), "")


def compare_trunks(network: InPrecision, image_BCHW: torch.Tensor) -> str:
    """Compare the fused trunk with the plain one on the first images; take the plain one if they differ. Collective.

    All ranks take it if one of them finds a difference. Returns the reason, "" if there is none.

    Args:
        network: network in training mode, with a fused trunk.
        image_BCHW: normalized images of a micro-batch.
    """
    assert network.fused_trunk is not None and network.dtype is not None
    # At least two: the batch norm behind the last layer has no variance over one image.
    image_BCHW = image_BCHW[: max(len(image_BCHW) // _COMPARED_SHARE, 2)]
    image_BCHW = image_BCHW.contiguous(memory_format=network.memory_format)
    found = trunk_difference(network.backbone, network.fused_trunk, image_BCHW, network.dtype)
    # One rank's finding decides for all: a kernel that fails on one GPU is not trusted on the others.
    reasons = collectives.gather_json(found)
    reason = next((f"{text} (on rank {rank})" for rank, text in enumerate(reasons) if text), "")
    if reason:
        network.fused_trunk = None
        network.remark = f"train.fused has no effect: in the first step, {reason}"
    return reason
