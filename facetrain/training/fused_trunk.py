"""Choice between the plain trunk of a backbone and the one on fused kernels (`train.fused`)."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from facetrain.backbone.iresnet import IResNet
from facetrain.distributed import collectives
from facetrain.distributed.sync_batch_norm import StatisticsAcrossRanks
from facetrain.errors import ConfigError
from facetrain.optim.frozen_parts import has_frozen_batch_norm
from facetrain.training.precision import InPrecision


def choose_trunk(network: InPrecision, fused: str, *, checkpoint_activations: bool) -> None:
    """Let the training steps of a network run on the fused trunk if `fused` is `on`. Collective.

    All ranks take the same trunk: synchronized batch norms exchange other messages in each.

    Args:
        network: the network on its device, its batch norms synchronized already if they are to be.
        fused: value of `train.fused`. `auto` takes the plain trunk: it must not start kernels that nothing has
            verified on this machine.
        checkpoint_activations: whether blocks are recomputed as a whole in the backward pass.

    Raises:
        ConfigError: `fused` is `on`, and the trunk cannot be used on some rank. All ranks raise it.
    """
    if fused == "auto":
        network.remark = (
            "train.fused: auto is off, because no self-test has verified the kernels on this machine"
        )
    if fused != "on":
        return
    # Every rank takes part, also one that lacks Triton.
    reasons = collectives.gather_json(_why_unusable(network, checkpoint_activations))
    for rank, reason in enumerate(reasons):
        if reason:
            place = f" on rank {rank}" if len(set(reasons)) > 1 else ""
            raise ConfigError(f"train.fused: on is not possible{place}: {reason}; set it to off")
    from facetrain.backbone.fused_iresnet import FusedTrunk

    assert isinstance(network.backbone, IResNet)
    synchronized = any(isinstance(module, nn.SyncBatchNorm) for module in network.backbone.modules())
    network.fused_trunk = FusedTrunk(network.backbone, StatisticsAcrossRanks() if synchronized else None)


def _why_unusable(network: InPrecision, checkpoint_activations: bool) -> str:
    """Return why this rank cannot use the fused trunk, "" if it can."""
    if reason := why_not_fused(network, checkpoint_activations):
        return reason
    from facetrain.backbone.kernels.self_check import why_unusable

    assert network.dtype is not None
    return why_unusable(network.device, network.dtype)


def why_not_fused(network: InPrecision, checkpoint_activations: bool) -> str:
    """Return why a network has no fused trunk whatever the GPU, "" if it has one."""
    backbone = network.backbone
    if not isinstance(backbone, IResNet):
        return "only r18 to r2060 and iresnet have a fused trunk"
    if backbone.subsample_shortcut:
        return "the fused blocks have a convolution in every shortcut, and ir18 to ir101 do not"
    if network.dtype is None:
        return "train.precision is fp32, and the kernels are for bf16 and fp16"
    if network.memory_format != torch.channels_last:
        return "the kernels read the channels_last layout, and train.channels_last is false"
    if network.compile_mode != "off":
        return "train.compile compiles the same blocks"
    if checkpoint_activations:
        return "model.checkpoint_activations recomputes the same blocks"
    if has_frozen_batch_norm(backbone):
        return (
            "the kernels use the statistics of each batch, and model.freeze, model.lora or model.train_batch_norm "
            "fixes them"
        )
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""
