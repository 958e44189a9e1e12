"""Base class of the settings of the parts, which are the sections of the config, and types that several share.

Each part declares its settings in its `settings.py`. These modules import no torch, so that a config is read fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import CoreSchema, core_schema

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
ImageSize = Annotated[int, Field(ge=16, le=1024)]
"""Width and height of images in pixels."""


def _switch_name(value: object) -> object:
    """Return on or off for a truth value: YAML reads the words on and off as true and false."""
    return ("on" if value else "off") if isinstance(value, bool) else value


Compilation = Annotated[Literal["off", "on", "reduce-overhead"], BeforeValidator(_switch_name)]
Expectations = Annotated[Literal["off", "moving", "fixed"], BeforeValidator(_switch_name)]


class OneOf:
    """Constraint on text: one of the names of a registry."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Return the schema of a literal, whose names are in messages and in the JSON schema."""
        return core_schema.literal_schema(self._names)


def imported(place: str) -> Any:
    """Return what a registry names: MODULE:NAME. It is imported now, so that the registry needs no import."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


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
