"""docs/config.md against the schema: every section and key, with values, default and description."""

import json
from typing import get_args

import pytest
from pydantic import BaseModel

from facetrain.config.explain import describe_key
from facetrain.config.schema import Config
from tests.support.command import ROOT

LINES = (ROOT / "docs" / "config.md").read_text().splitlines()


def inner_section(field):
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def sections(section, key=""):
    """Yield (key, section) of every section but the outermost."""
    for name, field in section.model_fields.items():
        if inner := inner_section(field):
            yield key + (field.alias or name), inner
            yield from sections(inner, f"{key}{field.alias or name}.")


def keys():
    """Yield (key, field) of every key that is not a section."""
    for prefix, section in [("", Config), *((f"{key}.", inner) for key, inner in sections(Config))]:
        for name, field in section.model_fields.items():
            if not inner_section(field):
                yield prefix + (field.alias or name), field


@pytest.mark.parametrize(("key", "field"), [pytest.param(*each, id=each[0]) for each in keys()])
def test_every_key_is_documented_with_values_default_and_description(key, field):
    default = "required" if field.is_required() else f"`{json.dumps(field.get_default())}`"
    assert field.description, "the schema describes every key"
    description = " ".join(field.description.split())
    assert f"| `{key}` | {describe_key(key)} | {default} | {description} |" in LINES


@pytest.mark.parametrize(("key", "section"), [pytest.param(*each, id=each[0]) for each in sections(Config)])
def test_every_section_is_documented(key, section):
    assert LINES[LINES.index(f"### {key}") + 2] == " ".join(section.__doc__.split())


def test_no_key_is_documented_that_does_not_exist():
    documented = [line.split("`")[1] for line in LINES if line.startswith("| `")]
    known = {key for key, _ in keys()} | {key for key, _ in sections(Config)}
    # The two recipes have rows of their own.
    assert set(documented) - known == {"arcface2022", "head"} - known
