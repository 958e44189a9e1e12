"""How large the state of a run is, before there is one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.doctor.finding import Finding, failure, ok, warning

_GIB = 1 << 30
_BYTES = {"float32": 4, "bfloat16": 2}
_MOMENTS = {"sgd": 1, "adamw": 2}


@dataclass(frozen=True)
class StateSize:
    """Bytes of what a checkpoint holds: each weight with its optimizer's moments."""

    backbone: int
    """float32; every rank has all of it."""
    head: int
    """Of all classes; the ranks share it."""
    gradients: int
    """Of the backbone. The head never has those of all its centres."""

    @property
    def checkpoint(self) -> int:
        """Bytes of one checkpoint, over all ranks."""
        return self.backbone + self.head


def state_size(
    backbone: dict[str, object],
    num_classes: int,
    *,
    optimizer: str,
    weight_dtype: str = "float32",
    momentum_dtype: str = "float32",
) -> StateSize:
    """Work out sizes from the arguments of `build_backbone` and the numbers of a config.

    Raises:
        ModelError: there is no such backbone.
    """
    with torch.device("meta"):
        model = build_backbone(**backbone)  # type: ignore[arg-type]
    gradients = 4 * sum(parameter.numel() for parameter in model.parameters())
    moments = _MOMENTS[optimizer]
    row = model.embedding_size * (_BYTES[weight_dtype] + moments * _BYTES[momentum_dtype])
    return StateSize(gradients * (1 + moments), num_classes * row, gradients)


def check_memory(standing: int, total: int) -> list[Finding]:
    """Compare the bytes that a device must hold at all times with those that it has."""
    found = f"{standing / _GIB:.1f} of {total / _GIB:.0f} GiB hold weights and moments, the rest activations"
    if standing > total:
        do = "use more GPUs, head.placement: host, or head.momentum_dtype: bfloat16"
        return [failure("memory", found, do)]
    if standing > total / 2:
        do = "find the largest batch that fits: `facetrain plan`; see head.placement and momentum_dtype"
        return [warning("memory", found, do)]
    return [ok("memory", found)]
