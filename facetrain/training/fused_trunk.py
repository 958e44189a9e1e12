"""Choice between the plain trunk of a backbone and the one on fused kernels (`train.fused`)."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import nn

from facetrain.backbone.base import Backbone
from facetrain.backbone.iresnet import IResNet
from facetrain.distributed import collectives
from facetrain.distributed.sync_batch_norm import StatisticsAcrossRanks
from facetrain.errors import ConfigError
from facetrain.optim.frozen_parts import has_frozen_batch_norm
from facetrain.telemetry.log import logger

if TYPE_CHECKING:
    from facetrain.backbone.fused_iresnet import FusedTrunk

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_trunk(
    backbone: Backbone,
    fused: str,
    precision: str,
    device: torch.device,
    *,
    memory_format: torch.memory_format,
    compile: bool,
    checkpoint_activations: bool,
) -> FusedTrunk | None:
    """Return the fused trunk of a backbone, or None for the plain one.

    Args:
        backbone: the network on its device, its batch norms synchronized already if they are to be.
        fused: `auto` takes the fused trunk where it works, `on` requires it, `off` never takes it.
        precision: bf16, fp16 or fp32.
        device: device of the backbone.
        memory_format: layout of weights and images.
        compile: whether torch.compile compiles the blocks.
        checkpoint_activations: whether blocks are recomputed as a whole in the backward pass.

    Raises:
        ConfigError: `fused` is `on`, and the trunk cannot be used; the message has the reason.
    """
    if fused == "off" or (fused == "auto" and device.type == "cpu"):
        return None
    reason = _settings_against(
        backbone, precision, memory_format, compile=compile, checkpoint_activations=checkpoint_activations
    )
    if not reason:
        from facetrain.backbone.kernels.self_check import why_unusable

        # All ranks take the same trunk: synchronized batch norms exchange other messages in each.
        reason = why_unusable(device, _DTYPES[precision])
        if collectives.any_rank(bool(reason)):
            reason = reason or "the kernels cannot be used on another rank"
    if reason:
        if fused == "on":
            raise ConfigError(f"train.fused: on is not possible: {reason}; set it to auto or off")
        logger.info("the backbone runs without fused kernels: %s", reason)
        return None
    from facetrain.backbone.fused_iresnet import FusedTrunk

    assert isinstance(backbone, IResNet)
    synchronized = any(isinstance(module, nn.SyncBatchNorm) for module in backbone.modules())
    return FusedTrunk(backbone, StatisticsAcrossRanks() if synchronized else None)


def _settings_against(
    backbone: Backbone,
    precision: str,
    memory_format: torch.memory_format,
    *,
    compile: bool,
    checkpoint_activations: bool,
) -> str:
    """Return the setting that rules the fused trunk out, "" if there is none."""
    if not isinstance(backbone, IResNet):
        return "only r18 to r2060 and iresnet have a fused trunk"
    if backbone.subsample_shortcut:
        return "the fused blocks have a convolution in every shortcut, and ir18 to ir101 do not"
    if precision not in _DTYPES:
        return "train.precision is fp32, and the kernels are for bf16 and fp16"
    if memory_format != torch.channels_last:
        return "the kernels read the channels_last layout, and train.channels_last is false"
    if compile:
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
