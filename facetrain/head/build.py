"""Construction of the head's parts from the settings of the section `head`."""

from __future__ import annotations

import inspect
from typing import Any

from facetrain.head.margins.base import Margin
from facetrain.head.margins.function_margin import make_margin
from facetrain.head.margins.registry import MARGINS
from facetrain.head.settings import MarginSettings
from facetrain.own_parts import is_place, load_part
from facetrain.settings import imported


def build_margin(settings: MarginSettings, *, seed: int = 0) -> Margin:
    """Build the margin that `settings.type` names; `seed` is for margins that draw random numbers."""
    is_own = is_place(settings.type)
    return make_margin(
        load_part(settings.type, "head.margin.type") if is_own else settings.type,
        scale=settings.scale,
        filter_threshold=settings.filter_threshold,
        seed=seed,
        **(settings.options if is_own else _numbers(settings)),
    )


def _numbers(settings: MarginSettings) -> dict[str, Any]:
    """Return the settings that the formula has. Those that are null keep the published values."""
    names = inspect.signature(imported(MARGINS[settings.type])).parameters.keys() & {
        "m1",
        "m2",
        "m3",
        "gradient",
    }
    return {name: value for name in sorted(names) if (value := getattr(settings, name)) is not None}
