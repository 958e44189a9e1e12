"""Messages for invalid configs: key, value, and the values that are allowed.

pydantic's own messages speak of Python types ("input should be a valid tuple"). These come from the JSON schema.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import ValidationError

from facetrain.config.schema import NAME_PATTERN, Config

_MAX_VALUE = 60
"""Characters of an invalid value that a message shows."""
_PATTERNS = {NAME_PATTERN: "letters, digits, '.', '_' and '-', beginning with a letter or a digit"}

_SYNONYMS = {"learning_rate": "lr", "network": "backbone", "wd": "weight_decay"}
"""Names of keys in other projects, with ours where difflib does not find it."""

REMOVED_KEYS = {
    "head.drop_sub_centers_epoch": None,
    "head.drop_angle": 75.0,
    "head.loss": "softmax",
    "head.negative_weight": 1.0,
    "optim.layer_decay": 1.0,
    "head.margin.h": 0.333,
    "head.margin.average": 0.01,
    "head.margin.sigma": 0.0125,
    "head.margin.norms": [10.0, 110.0],
    "head.margin.margins": [0.45, 0.8],
    "head.margin.norm_weight": 35.0,
    "head.margin.beyond_pi": "linear",
    "head.sub_centers": 1,
    "head.sample_block": "auto",
    "optim.start_factor": 0.04,
    "optim.ema": None,
    "train.loss_spike": None,
    "checkpoint.every_minutes": None,
    "train.stages.image_size": None,
    "train.tf32": True,
    "train.cuda_graphs": "auto",
    "train.compile": "auto",
    "log.mlflow": None,
    "log.mlflow_experiment": "facetrain",
    "log.wandb": None,
    "data.decode": "cpu",
    "data.augment.erase": 0.0,
    "data.augment.jpeg": 0.0,
    "data.synthetic": None,
}
"""Keys or values of earlier versions that had no effect: the config of each run of such a version has them."""

Schema = dict[str, Any]


def explain(error: ValidationError) -> str:
    """Return all faults of a config in one line, each of them once."""
    # A value that fits none of several allowed types has one fault for each type: the same message.
    return "; ".join(dict.fromkeys(_explain_fault(fault) for fault in error.errors()))


def describe_values(schema: Schema) -> str:
    """Return the values that a JSON schema allows, for example "a number greater than 0, or null"."""
    schema = _resolve(schema)
    if "anyOf" in schema:
        # A key that may be null has two schemas.
        *others, last = [describe_values(each) for each in schema["anyOf"]]
        return f"{', '.join(others)}, or {last}"
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _bounds(schema)
    if kind == "array":
        return _describe_list(schema)
    if kind == "object":
        if "properties" in schema:
            return "a section of `key: value` lines"
        return f"`name: value` lines, each value {describe_values(schema['additionalProperties'])}"
    return {"boolean": "true or false", "null": "null"}.get(str(kind)) or _PATTERNS.get(
        schema.get("pattern", ""), "text"
    )


def describe_key(key: str) -> str:
    """Return the values that a dotted key of the config allows."""
    return describe_values(_locate(tuple(key.split(".")))[1])


def _describe_list(schema: Schema) -> str:
    if "prefixItems" in schema:
        items = schema["prefixItems"]
        return f"a list of {len(items)} values in brackets, each {describe_values(items[0])}"
    return f"a list in brackets, each value {describe_values(schema['items'])}"


def _bounds(schema: Schema) -> str:
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


def _explain_fault(fault: Any) -> str:
    if fault["type"] == "extra_forbidden":
        *parents, unknown = fault["loc"]
        section, schema = _locate(tuple(parents))
        name = f"{section}.{unknown}".lstrip(".")
        if name in REMOVED_KEYS:
            return f"{name} is not a key anymore; remove it, and see CHANGELOG.md for what replaces it"
        return f"{name} is not a key{_similar_key(str(unknown), schema)}"
    key, schema = _locate(fault["loc"])
    if fault["type"] == "missing":
        return f"{key} is missing"
    if fault["type"] == "value_error":  # a rule of the settings, which brings its message
        message = str(fault["ctx"]["error"])
        return f"{key}: {message}" if key else message
    value = json.dumps(fault["input"], default=str, ensure_ascii=False)
    if len(value) > _MAX_VALUE:
        value = f"{value[:_MAX_VALUE]}…"
    # A misspelled name gets the nearest one; anything else gets the list of what is allowed.
    names = schema.get("enum", []) if isinstance(fault["input"], str) else []
    if similar := _similar_name(str(fault["input"]), names):
        return f"{key}: {value} does not exist; did you mean {similar}?"
    return f"{key}: {value} is invalid; use {describe_values(schema)}"


def _locate(location: tuple[str | int, ...]) -> tuple[str, Schema]:
    """Return the name of a key and its schema. pydantic's location ends with the type that it has tried."""
    schema, names = _resolve(_schema()), ""
    for part in location:
        inner = _child(schema, part)
        if inner is None:
            break
        names += f"[{part}]" if isinstance(part, int) else f".{part}"
        schema = inner
    return names.lstrip("."), schema


def _child(schema: Schema, part: str | int) -> Schema | None:
    """Return the schema of a key in a section, or of an item of a list; None if there is none."""
    for option in _options(schema):
        if isinstance(part, int):
            items = option.get("prefixItems")
            found = items[part] if items and part < len(items) else option.get("items")
        elif "properties" in option:
            found = option["properties"].get(part)
        elif "items" in option:  # a key of the sections in a list
            found = _child(_resolve(option["items"]), part)
        else:
            found = option.get("additionalProperties")
        if isinstance(found, dict):
            return _resolve(found)
    return None


def _similar_key(unknown: str, section: Schema) -> str:
    known = [key for option in _options(section) for key in option.get("properties", {})]
    if similar := difflib.get_close_matches(unknown, known, n=1):
        return f"; did you mean {similar[0]}?"
    if elsewhere := list(_keys_named(_SYNONYMS.get(unknown, unknown))):
        return f"; did you mean {' or '.join(elsewhere)}?"
    return f"; the keys are {', '.join(known)}"


def _keys_named(name: str) -> Iterator[str]:
    """Yield the dotted keys of the sections that have this name."""
    for section, schema in _schema()["properties"].items():
        for option in _options(_resolve(schema)):
            if name in option.get("properties", {}):
                yield f"{section}.{name}"


def _similar_name(unknown: str, names: list[str]) -> str | None:
    # InsightFace and others name r50 iresnet50 or ir_50: difflib finds torchvision's resnet50, another network.
    depth = re.fullmatch(r"(?:l?resnet|ir|iresnet)[-_]?(\d+)(?:e-ir)?", unknown.lower())
    if depth and f"r{depth[1]}" in names and unknown.lower().replace("_", "") not in names:
        return f"r{depth[1]}"
    return next(iter(difflib.get_close_matches(unknown, names, n=1)), None)


def _options(schema: Schema) -> list[Schema]:
    return [_resolve(each) for each in schema["anyOf"]] if "anyOf" in schema else [schema]


def _resolve(schema: Schema) -> Schema:
    """Follow a reference to another section of the schema."""
    reference = schema.get("$ref")
    return _schema()["$defs"][reference.rpartition("/")[2]] if reference else schema


@cache
def _schema() -> Schema:
    return Config.model_json_schema()
