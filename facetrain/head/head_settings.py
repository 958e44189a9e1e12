"""Settings of a head, which a run derives from the sections `head` and `train` of its config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class HeadStage:
    """Consecutive steps in which a head has the same settings."""

    first_step: int
    sample_rate: float
    """Fraction of the classes that take part in a step."""
    expectations: str
    """off, moving or fixed."""


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """Settings of a head.

    The section `head` of the config's schema states their meaning and their defaults; what a run derives from
    other sections is explained here.
    """

    loss: str
    negative_weight: float
    sub_centers: int
    drop_from_step: int | None
    """First step with dominant sub-centers only; None: never."""
    drop_angle: float
    sample_rate: float
    stages: tuple[HeadStage, ...]
    """Stages of the run, the first from step 0 on; (): one, with the settings of this object."""
    expectations: str
    expectation_margin: float
    sample_block: int
    weight_dtype: torch.dtype
    momentum_dtype: torch.dtype
    placement: str
    folder: Path | None
    """Folder of the row file, with placement disk."""
    chunk_size: int | None
    """None: `default_chunk_size`."""
    product_dtype: torch.dtype | None
    """Dtype to which the factors of the large matrix products are rounded; None: they keep theirs."""
    update_in_backward: bool
    """Update the centers chunk by chunk in the backward pass. Needs one micro-batch per step."""
    trained: bool = True
    """Train the centers. False: they have no moments, and the backward pass computes no gradient of them."""
