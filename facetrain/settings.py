"""Base class of the settings of the parts, which are the sections of the config, and types that several share.

Each part declares its settings in its `settings.py`. These modules import no torch, so that a config is read fast.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
ImageSize = Annotated[int, Field(ge=16, le=1024)]
"""Width and height of images in pixels."""


def _switch_name(value: object) -> object:
    """Return on or off for a truth value: YAML reads the words on and off as true and false."""
    return ("on" if value else "off") if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch_name)]


Expectations = Annotated[Literal["off", "moving", "fixed"], BeforeValidator(_switch_name)]


class Settings(BaseModel):
    """Settings of a part: reject unknown keys, and cannot be changed."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
        populate_by_name=True,
    )
