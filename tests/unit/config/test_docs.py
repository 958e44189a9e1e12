"""docs/config.md against the schema: every key stands there, with its default."""

import json
from typing import get_args

import pytest
from pydantic import BaseModel

from facetrain.config.schema import Config
from tests.support.command import ROOT

TEXT = (ROOT / "docs" / "config.md").read_text()


def keys(section, prefix=""):
    """Yield (name, field) of every key that is no section."""
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        inner = [
            kind
            for kind in (field.annotation, *get_args(field.annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if inner:
            yield from keys(inner[0], key + ".")
        else:
            yield key, field


@pytest.mark.parametrize(
    ("key", "field"), list(keys(Config)), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_key_is_documented_with_its_default(key, field):
    lines = [line for line in TEXT.splitlines() if line.startswith(f"| `{key}` |")]
    assert len(lines) == 1
    default = field.get_default()
    shown = "required" if field.is_required() else f"`{json.dumps(default)}`"
    assert f"| {shown} |" in lines[0]
