"""Write the reference of all keys into docs/config.md, below its heading "Keys": `make config-docs`.

Values, defaults and descriptions are those of the settings; the text above the heading is written by hand.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from facetrain.config.explain import fields_of, section_of
from facetrain.config.schema import NAME_PATTERN, Config
from facetrain.own_parts import PLACE_PATTERN

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
HEADING = "## Keys\n"
WIDTH = 120
PATTERNS = {
    NAME_PATTERN: "letters, digits, '.', '_' and '-', beginning with a letter or a digit",
    PLACE_PATTERN: "MODULE:NAME",
    "^timm/": "timm/NAME",
}
"""Texts of a pattern, in words."""


def page() -> str:
    """Return the text of docs/config.md: the introduction that it has, and the reference of the present settings."""
    introduction, heading, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    return "\n".join([introduction + heading, *keys(Config), *sections(Config)]) + "\n"


def sections(settings: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the lines of the sections in some settings."""
    for name, field in fields_of(settings).items():
        if inner := section_of(field):
            key = prefix + name
            yield f"\n### {key}\n"
            for paragraph in (*str(inner.__doc__).split("\n\n"), field.description):
                if paragraph:
                    yield wrapped(paragraph) + "\n"
            yield from keys(inner, f"{key}.")
            yield from sections(inner, f"{key}.")


def keys(settings: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the lines of the keys of some settings that are not sections."""
    schema = settings.model_json_schema()["properties"]
    for name, field in fields_of(settings).items():
        if not section_of(field):
            key = prefix + name
            default = "required" if field.is_required() else f"default `{json.dumps(field.get_default())}`"
            values = describe_values(schema[name])
            yield wrapped(f"- **`{key}`**: {values}; {default}.", "  ")
            yield "  " + wrapped(str(field.description), "  ")


def all_keys(settings: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys and sections."""
    for name, field in fields_of(settings).items():
        key = prefix + name
        yield key
        if inner := section_of(field):
            yield from all_keys(inner, f"{key}.")


def wrapped(text: str, indent: str = "") -> str:
    """Return a paragraph in lines; all but the first are indented."""
    lines = textwrap.wrap(
        " ".join(text.split()), WIDTH - len(indent), break_long_words=False, break_on_hyphens=False
    )
    return f"\n{indent}".join(lines)


def describe_values(schema: dict[str, Any]) -> str:
    """Return the values that the JSON schema of a key allows, for example "a number greater than 0, or null"."""
    if "anyOf" in schema:
        # A key that may be null has two schemas.
        *others, last = [describe_values(each) for each in schema["anyOf"]]
        return f"{', '.join(others)}, or {last}"
    if "$ref" in schema:
        return "keys in braces"
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + bounds_of(schema)
    if kind == "array" and "prefixItems" in schema:
        items = schema["prefixItems"]
        return f"a list of {len(items)} values in brackets, each {describe_values(items[0])}"
    if kind == "array":
        return f"a list in brackets, each value {describe_values(schema['items'])}"
    if kind == "object":
        values = schema["additionalProperties"]
        return "`name: value` lines" + ("" if values is True else f", each value {describe_values(values)}")
    if pattern := schema.get("pattern"):
        return PATTERNS[pattern]
    return {"boolean": "true or false", "null": "null"}.get(str(kind), "text")


def bounds_of(schema: dict[str, Any]) -> str:
    """Return the bounds of a number in a JSON schema, for example " of at least 0"."""
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']} to {schema['maximum']}"
    names = {
        "exclusiveMinimum": "greater than",
        "minimum": "of at least",
        "exclusiveMaximum": "less than",
        "maximum": "of at most",
        "multipleOf": "a multiple of",
    }
    bounds = [f"{words} {schema[name]}" for name, words in names.items() if name in schema]
    return f" {' and '.join(bounds)}" if bounds else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
