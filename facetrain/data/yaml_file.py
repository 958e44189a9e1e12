"""YAML files beside datasets, checked against a settings model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from facetrain.errors import DataError
from facetrain.files import error_reason, read_regular_text
from facetrain.strict_yaml import lacks_quotes, parse_yaml
from facetrain.text import printable

_Model = TypeVar("_Model")
_MAX_CHARACTERS = 1 << 20


def read_yaml(path: Path, model: type[_Model] | Any) -> _Model:
    """Return the content of a YAML file as a settings model, or as a type that pydantic checks.

    Raises:
        DataError: the file cannot be read, is too long, or does not fit the model; the message names the first fault.
    """
    try:
        text = read_regular_text(path)
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"more than {_MAX_CHARACTERS:,} characters")
        content: _Model = TypeAdapter(model).validate_python(parse_yaml(text))
        return content
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"])) or "the content"
        # What misses a key is the whole section, and says nothing about the key.
        is_missing = fault["type"] == "missing"
        found = "missing" if is_missing else f"{fault['input']!r:.60}: {fault['msg']}"
        is_text = fault["type"] == "string_type" and lacks_quotes(fault["input"])
        advice = "; put the text in quotes" if is_text else ""
        raise DataError(printable(f"{path}: {key} is {found}{advice}")) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error_reason(error)}") from error
