"""Write the reference of all keys into docs/config.md, below its heading "Keys": `make config-docs`.

Values, defaults and descriptions are those of the settings; the text above the heading is written by hand.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from facetrain.config.explain import describe_key
from facetrain.config.schema import Config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
HEADING = "## Keys\n"
WIDTH = 120


def page() -> str:
    """Return the text of docs/config.md: the introduction that it has, and the reference of the present settings."""
    introduction, heading, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    return "\n".join([introduction + heading, *keys(Config), *sections(Config)]) + "\n"


def sections(settings: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the lines of the sections in some settings."""
    for name, field in settings.model_fields.items():
        if inner := section_of(field):
            key = f"{prefix}{field.alias or name}"
            yield f"\n### {key}\n"
            for paragraph in (*str(inner.__doc__).split("\n\n"), field.description):
                if paragraph:
                    yield wrapped(paragraph) + "\n"
            yield from keys(inner, f"{key}.")
            yield from sections(inner, f"{key}.")


def keys(settings: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the lines of the keys of some settings that are not sections."""
    for name, field in settings.model_fields.items():
        if not section_of(field):
            key = prefix + (field.alias or name)
            default = "required" if field.is_required() else f"default `{json.dumps(field.get_default())}`"
            yield wrapped(f"- **`{key}`**: {describe_key(key)}; {default}.", "  ")
            yield "  " + wrapped(str(field.description), "  ")


def all_keys(settings: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys and sections."""
    for name, field in settings.model_fields.items():
        key = prefix + (field.alias or name)
        yield key
        if inner := section_of(field):
            yield from all_keys(inner, f"{key}.")


def wrapped(text: str, indent: str = "") -> str:
    """Return a paragraph in lines; all but the first are indented."""
    lines = textwrap.wrap(
        " ".join(text.split()), WIDTH - len(indent), break_long_words=False, break_on_hyphens=False
    )
    return f"\n{indent}".join(lines)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the settings that a key has as its value, or in a list; None if it is not a section."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
