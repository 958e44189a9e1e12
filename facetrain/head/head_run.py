"""Values that a head takes from its run, beside its settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from facetrain.head.settings import HeadSettings


class HeadStage(NamedTuple):
    """Consecutive steps in which a head has the same settings."""

    first_step: int
    settings: HeadSettings
    """Settings of the stage; sample rate and use of the expectations may differ from stage to stage."""


@dataclass(frozen=True, kw_only=True)
class HeadRun:
    """Values that a head takes from its run, beside its settings."""

    seed: int = 0
    """Key of the first centers, the samples and the stochastic rounding."""
    margin_seed: int = 0
    """Key of the margins that are drawn at random."""
    stages: tuple[HeadStage, ...] = ()
    """Stages of the run, the first from step 0 on; (): one, with the settings of the head."""
    folder: Path | None = None
    """Folder of the row file, with placement disk."""
    product_dtype: torch.dtype | None = None
    """Dtype to which the factors of the large matrix products are rounded; None: they keep theirs."""
    update_in_backward: bool = True
    """Update the centers chunk by chunk in the backward pass. Needs one micro-batch per step."""
    trained: bool = True
    """Train the centers. False: they have no moments, and the backward pass computes no gradient of them."""
