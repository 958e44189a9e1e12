"""Choice between the plain trunk of a backbone and the one on fused kernels (`train.fused`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from facetrain.backbone.iresnet import IResNet
from facetrain.distributed import collectives
from facetrain.distributed.sync_batch_norm import StatisticsAcrossRanks
from facetrain.errors import ConfigError
from facetrain.optim.frozen_parts import has_frozen_batch_norm
from facetrain.training.kernel_verdicts import LIMIT_S, agree_on_kernels
from facetrain.training.precision import InPrecision
from facetrain.training.trunk_comparison import trunk_difference

_COMPARED_SHARE = 4
"""One in so many images of a micro-batch is compared: the plain trunk keeps twice as many activations, and in float32
each has twice the bytes, so the comparison needs no more memory than the step."""


def choose_trunk(
    network: InPrecision, fused: str, *, checkpoint_activations: bool, limit_s: float = LIMIT_S
) -> None:
    """Let the training steps of a network run on the fused trunk if `fused` asks for it and it works. Collective.

    All ranks take the same trunk: synchronized batch norms exchange other messages in each. `network.remark` says why
    it is the plain one.

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
    synchronized = any(isinstance(module, nn.SyncBatchNorm) for module in network.backbone.modules())
    network.fused_trunk = FusedTrunk(network.backbone, StatisticsAcrossRanks() if synchronized else None)


def compare_trunks(network: InPrecision, image_BCHW: Tensor) -> str:
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
    # One rank's finding decides for all: with synchronized batch norms, the trunks exchange other messages.
    reasons = collectives.gather_json(found)
    reason = next((f"{text} (on rank {rank})" for rank, text in enumerate(reasons) if text), "")
    if reason:
        network.fused_trunk = None
        network.remark = f"train.fused has no effect: in the first step, {reason}"
    return reason


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
        (has_frozen_batch_norm(backbone), f"the kernels use the statistics of each batch, and {fixed} them"),
    )
    # One reason, the first of the list: a user who removes it sees the next.
    return next((reason for applies, reason in reasons if applies), "")
