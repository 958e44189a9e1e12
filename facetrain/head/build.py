"""Construction of a head from the section `head` of the config, and from what its run gives."""

from __future__ import annotations

import inspect
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from facetrain.distributed.world import World
from facetrain.errors import ConfigError
from facetrain.files import error_reason
from facetrain.head.class_centers import Storage
from facetrain.head.margins.base import Margin
from facetrain.head.margins.function_margin import make_margin, own_margin
from facetrain.head.margins.registry import MARGINS
from facetrain.head.partial_fc import PartialFC
from facetrain.head.row_optimizer import CenterUpdate
from facetrain.head.sampling import Stage
from facetrain.head.settings import HeadSettings, MarginSettings
from facetrain.optim.settings import OptimSettings
from facetrain.own_parts import is_place, load_part
from facetrain.settings import imported

_NUMBERS = ("m1", "m2", "m3", "gradient")
"""Keys of `head.margin` that some formulas have."""


@dataclass(frozen=True, kw_only=True)
class HeadRun:
    """Values that a head takes from its run, beside its settings."""

    seed: int = 0
    """Key of the first centers, the samples and the stochastic rounding."""
    margin_seed: int = 0
    """Key of the margins that are drawn at random."""
    stages: tuple[Stage, ...] = ()
    """Stages of the run, the first from step 0 on; (): one, with the settings of the head."""
    folder: Path | None = None
    """Folder of the row file, with placement disk."""
    product_dtype: torch.dtype | None = None
    """Dtype to which the factors of the large matrix products are rounded: bfloat16, or None for float32."""
    update_in_backward: bool = True
    """Update the centers chunk by chunk in the backward pass. Needs one micro-batch per step."""
    trained: bool = True
    """Train the centers. False: they have no moments, and the backward pass computes no gradient of them."""


def build_head(
    settings: HeadSettings,
    optim: OptimSettings,
    run: HeadRun,
    world: World,
    *,
    embedding_size: int,
    num_classes: int,
) -> PartialFC:
    """Build this rank's part of a head that updates its centers itself, by the optimizer of the backbone.

    Raises:
        ConfigError: the optimizer cannot keep its moments in their dtype.
        RunError: the disk has no space for the centers.
    """
    head = PartialFC(
        build_margin(settings.margin, seed=run.margin_seed),
        embedding_size,
        num_classes,
        seed=run.seed,
        device=world.device,
        chunk_size=None if settings.chunk_size == "auto" else settings.chunk_size,
        recompute=None if settings.recompute == "auto" else settings.recompute == "on",
        trained=run.trained,
        update=_center_update(settings, optim, run),
        storage=Storage(
            getattr(torch, settings.weight_dtype),
            settings.placement,
            run.folder,
            settings.classes_per_block,
        ),
        stages=run.stages or (stage_of(0, settings),),
        expectation_margin=settings.expectation_margin,
        place=(world.rank, world.size),
    )
    head.product_dtype = run.product_dtype
    head.use_kernels()
    return head


def stage_of(first_step: int, settings: HeadSettings) -> Stage:
    """Return the stage of a head that begins at a step with these settings."""
    return Stage(first_step, settings.sample_rate, settings.expectations)


def _center_update(settings: HeadSettings, optim: OptimSettings, run: HeadRun) -> CenterUpdate:
    return CenterUpdate(
        name=optim.name,
        momentum=optim.momentum,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        moment_dtype=getattr(torch, settings.momentum_dtype),
        in_backward=run.update_in_backward,
    )


def build_margin(settings: MarginSettings, *, seed: int = 0) -> Margin:
    """Build the margin that `settings.type` names; `seed` is for margins that draw random numbers.

    Raises:
        ConfigError: the user's own object cannot be copied.
    """
    common: dict[str, Any] = {
        "scale": settings.scale,
        "filter_threshold": settings.filter_threshold,
        "seed": seed,
    }
    if is_place(settings.type):
        # Its own copy: heads of one process, as of several datasets, would share the buffers of a module.
        part = load_part(settings.type, "head.margin.type")
        try:
            own = deepcopy(part)
        except Exception as error:  # raised by what the object has
            raise ConfigError(
                f"head.margin.type: {settings.type} cannot be copied ({error_reason(error)}), and each head needs its "
                "own copy; name a function or a class, or give the object only what `copy.deepcopy` copies"
            ) from error
        return own_margin(own, settings.options, common)
    return make_margin(settings.type, **common, **_numbers(settings))


def unused_keys(settings: MarginSettings) -> list[str]:
    """Return which of m2, m3 and gradient are given although the formula does not have them."""
    used = {} if is_place(settings.type) else _numbers(settings)
    given = {"m2": settings.m2, "m3": settings.m3, "gradient": settings.gradient != "exact"}
    return [key for key, is_given in given.items() if is_given and key not in used]


def _numbers(settings: MarginSettings) -> dict[str, Any]:
    """Return the settings that the formula has. Those that are null keep the published values."""
    arguments = inspect.signature(imported(MARGINS[settings.type])).parameters
    return {
        name: value
        for name in _NUMBERS
        if name in arguments and (value := getattr(settings, name)) is not None
    }
