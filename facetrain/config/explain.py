"""Messages for invalid configs: all faults in one line, each with its key and the value that was given."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from facetrain.config.schema import Config
from facetrain.settings import OwnPart, alternatives
from facetrain.strict_yaml import lacks_quotes
from facetrain.text import printable

_MAX_VALUE = 60
"""Characters of an invalid value that a message shows."""
_SYNONYMS = {"learning_rate": "lr", "network": "backbone", "wd": "weight_decay"}
"""Names of keys in other projects, with ours where difflib does not find it."""


def explain(error: ValidationError, values: dict[str, Any]) -> str:
    """Return all faults of a config in one line, each of them once; `values` is what was validated."""
    # A value that fits none of several allowed types has one fault for each type.
    faults = error.errors()
    as_text = {_name(fault["loc"], values) for fault in faults if fault["type"] == "value_error"}
    told = (fault for fault in faults if not _is_told(fault, values, as_text))
    # A key may have line breaks.
    return "; ".join(dict.fromkeys(printable(_explain_fault(fault, values)) for fault in told))


def _is_told(fault: Any, values: Any, as_text: set[str]) -> bool:
    """Return whether a fault only says that a text has no keys, or that keys are no text, where both are allowed.

    `as_text` are the keys whose value is wrong as a text, by a rule that has a better message.
    """
    key = _name(fault["loc"], values)
    if fault["type"] == "string_type" and isinstance(fault["input"], dict):
        # The last part of the location is then one of several types, and the keys have a fault of their own.
        return key == _name(fault["loc"][:-1], values)
    return fault["type"] == "model_type" and isinstance(fault["input"], str) and key in as_text


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the settings that a key has as its value, or in a list; None if it is not a section."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def fields_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section by their keys: Python has no name `async`."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def takes_text(key: str) -> bool:
    """Return whether the value of a dotted key is a text, and no number."""
    section: type[BaseModel] | None = Config
    kinds = list[Any]()
    for part in key.split("."):
        fields = fields_of(section) if section else {}
        if part not in fields:
            return False
        section, kinds = section_of(fields[part]), alternatives(fields[part].annotation)
    return str in kinds and not {bool, int, float} & {*kinds}


def _explain_fault(fault: Any, values: Any) -> str:
    key = _name(fault["loc"], values, is_missing=fault["type"] == "missing")
    if fault["type"] == "extra_forbidden":
        *parents, unknown = fault["loc"]
        return f"{key} is not a key{_similar_key(unknown, parents)}"
    if fault["type"] == "missing":
        return f"{key} is missing"
    if fault["type"] == "value_error":  # a rule of the settings, whose message is complete
        message = str(fault["ctx"]["error"])
        return f"{key}: {message}" if key else message
    value = fault["input"]
    given = str(value) if isinstance(value, date) else json.dumps(value, default=str, ensure_ascii=False)
    expected = fault["msg"].replace("a valid tuple", "a list, such as [a, b]")
    advice = "; put the text in quotes" if fault["type"] == "string_type" and lacks_quotes(value) else ""
    return f"{key}: {expected}, not {given[:_MAX_VALUE]}{'…' * (len(given) > _MAX_VALUE)}{advice}"


def _name(location: Sequence[Any], values: Any, *, is_missing: bool = False) -> str:
    """Return the dotted name of a place in the values, of which the last part may be missing there."""
    names = ""
    for place, part in enumerate(location, 1):
        if isinstance(values, list) and isinstance(part, int) and part < len(values):
            names, values = f"{names}[{part}]", values[part]
        elif isinstance(values, dict) and part in values:
            names, values = f"{names}.{part}", values[part]
        elif is_missing and place == len(location):
            names += f"[{part}]" if isinstance(part, int) else f".{part}"
        # Otherwise it is one of several types that pydantic has tried, and no part of the values.
    return names.lstrip(".")


def _similar_key(unknown: str, parents: Sequence[str | int]) -> str:
    section: type[BaseModel] = Config
    for part in parents:
        if part == OwnPart.__name__:  # one of the types that pydantic has tried for a sink
            section = OwnPart
        elif part in (fields := fields_of(section)):
            section = section_of(fields[part]) or section
    known = fields_of(section)
    # The same name in another section is more likely than a similar one in this.
    if same := list(_keys_named(unknown)):
        return f"; did you mean {' or '.join(same)}?"
    if similar := difflib.get_close_matches(unknown, known, n=1):
        return f"; did you mean {similar[0]}?"
    if elsewhere := list(_keys_named(_SYNONYMS.get(unknown, unknown))):
        return f"; did you mean {' or '.join(elsewhere)}?"
    return f"; the keys are {', '.join(known)}"


def _keys_named(name: str) -> Iterator[str]:
    """Yield the dotted keys of the sections that have this name."""
    for key, field in fields_of(Config).items():
        if (section := section_of(field)) and name in fields_of(section):
            yield f"{key}.{name}"
