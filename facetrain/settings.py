"""Base class of the settings of the parts, which are the sections of the config, and types that several share.

Each part declares its settings in its `settings.py`. These modules import no torch, so that a config is read fast.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from importlib import import_module
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import CoreSchema, core_schema

from facetrain.own_parts import PLACE_PATTERN, is_place

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
PathText = Annotated[str, Field(min_length=1)]
"""Path or address. An empty text would be the current folder in one place, and no path in another."""
_LARGEST_SIDE = 1024
Side = Annotated[int, Field(gt=0, le=_LARGEST_SIDE)]
"""Pixels to which images are shrunk."""
ImageSize = Annotated[int, Field(ge=16, le=_LARGEST_SIDE)]
"""Width and height of images in pixels."""


def _switch_name(value: object) -> object:
    """Return on or off for a truth value: YAML reads the words on and off as true and false."""
    return ("on" if value else "off") if isinstance(value, bool) else value


Compilation = Annotated[Literal["off", "on", "reduce-overhead"], BeforeValidator(_switch_name)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch_name)]
Expectations = Annotated[Literal["off", "moving", "fixed"], BeforeValidator(_switch_name)]


class OneOf:
    """Constraint on text: one of the names of a registry, or also the place of a part of one's own."""

    def __init__(
        self,
        names: Iterable[str],
        *,
        own: bool = False,
        prefix: str | None = None,
        alias: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        """Take the names.

        Args:
            names: of the registry.
            own: whether MODULE:NAME is allowed, too.
            prefix: beginning of the names of a library, which are checked when the part is built. None: no such names.
            alias: returns ours for a name of another project, None if it knows none.
        """
        self._names, self._own, self._prefix, self._alias = list(names), own, prefix, alias

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Return the schema of text that is checked."""
        return core_schema.no_info_after_validator_function(self._check, core_schema.str_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        """Return the JSON schema, which has the names."""
        patterns = [f"^{self._prefix}"] * bool(self._prefix) + [PLACE_PATTERN] * self._own
        others = [{"type": "string", "pattern": pattern} for pattern in patterns]
        names = {"type": "string", "enum": self._names}
        return {"anyOf": [names, *others]} if others else names

    def _check(self, name: str) -> str:
        if name in self._names or (self._own and is_place(name)):
            return name
        if self._prefix and name.startswith(self._prefix):
            return name
        similar = self._alias(name) or next(iter(difflib.get_close_matches(name, self._names, n=1)), None)
        others = [f"{self._prefix}NAME"] * bool(self._prefix) + ["MODULE:NAME"] * self._own
        hint = f"did you mean {similar}?" if similar else f"use one of {', '.join([*self._names, *others])}"
        raise ValueError(f"{name} does not exist; {hint}")


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
        ser_json_inf_nan="constants",  # the options of an own part may have them; otherwise they would become None
        use_attribute_docstrings=True,
        validate_default=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads the words on, off, yes and no as truth values, and pydantic takes those for 1 and 0.
        _require_no_truth_value(value, cls.model_fields[str(info.field_name)].annotation)
        return value


def _require_no_truth_value(value: Any, annotation: Any) -> None:
    """Check that a value, also one in a list or a mapping, is a number where the annotation has one."""
    kinds = alternatives(annotation)
    if isinstance(value, bool) and {int, float} & {*kinds} and bool not in kinds:
        raise ValueError(f"{str(value).lower()} is a truth value, and the key takes a number")
    for each in kinds:
        origin, arguments = get_origin(each), get_args(each)
        if origin in (tuple, list) and isinstance(value, list | tuple):
            for item in value:
                _require_no_truth_value(item, arguments[0])
        elif origin is dict and isinstance(value, dict):
            for item in value.values():
                _require_no_truth_value(item, arguments[1])


def alternatives(annotation: Any) -> list[Any]:
    """Return the types of an annotation: one, or those of a union."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [each for argument in get_args(annotation) for each in alternatives(argument)]
    return [annotation]


class OwnPart(Settings):
    """Part of one's own."""

    type: Annotated[str, Field(pattern=PLACE_PATTERN)]
    """Place of its code: MODULE:NAME."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments."""
