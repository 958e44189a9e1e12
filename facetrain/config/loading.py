"""From a YAML file, what it extends, its recipe and --set to a checked `Config`."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml as pyyaml
from pydantic import BaseModel, ValidationError

from facetrain.config import strict_yaml as yaml
from facetrain.config.schema import RECIPES, Config
from facetrain.errors import ConfigError

MAX_EXTENDS = 16


def load_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read a run description; later wins: recipe, extended file, file, overrides.

    Raises:
        ConfigError: one line that lists every fault found.
    """
    return build_config(read_merged(Path(path)), str(path), overrides)


def build_config(values: dict[str, Any], where: str, overrides: Iterable[str] = ()) -> Config:
    """Check values that came from anywhere, with the recipe's defaults beneath them and overrides above."""
    changes = [_parse_override(override) for override in overrides]
    for change in changes:
        _merge(values, change)
    recipe = values.get("recipe", Config.model_fields["recipe"].default)
    beneath = json.loads(json.dumps(RECIPES.get(recipe, {}) if isinstance(recipe, str) else {}))
    _merge(beneath, values)
    try:
        return Config.model_validate(beneath)
    except ValidationError as error:
        where += " with --set" if changes else ""
        raise ConfigError(f"{where}: {'; '.join(_explain(fault) for fault in error.errors())}") from error


def plain_config(config: Config) -> dict[str, Any]:
    """Return every key and its value, as JSON has them."""
    plain: dict[str, Any] = json.loads(config.model_dump_json(by_alias=True))
    return plain


def dump_config(config: Config) -> str:
    """Return the YAML that reads back as the same config, with every key."""
    return pyyaml.safe_dump(plain_config(config), sort_keys=False, allow_unicode=True)


def read_merged(path: Path, _seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file and, beneath it, the one that it extends.

    Raises:
        ConfigError: a file is missing or extends itself.
    """
    path = path.resolve() if _seen else path
    if path.resolve() in _seen or len(_seen) >= MAX_EXTENDS:
        raise ConfigError(f"{path}: extends itself, by way of {' → '.join(str(p) for p in _seen)}")
    values = yaml.read(path)
    parent = values.pop("extends", None)
    if parent is None:
        return values
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: extends: give the name of one file")
    base = read_merged(path.parent / parent, (*_seen, path.resolve()))
    _merge(base, values)
    return base


def _merge(under: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(key), dict):
            _merge(under[key], value)
        else:
            under[key] = value


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not all(part.isidentifier() for part in key.strip().split(".")):
        raise ConfigError(f"--set {override}: give KEY=VALUE, for example --set optim.lr=0.2")
    value = yaml.parse(text, f"--set {key}")
    for part in reversed(key.strip().split(".")):
        value = {part: value}
    return dict(value)


def _explain(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{where} is not a key{_did_you_mean(fault['loc'])}"
    if fault["type"] == "missing":
        return f"{where} is missing"
    said = fault["msg"].removeprefix("Value error, ")
    said = said[:1].lower() + said[1:]
    if isinstance(fault["input"], dict):
        return f"{where}: {said}" if where else said
    given = json.dumps(fault["input"], default=str)
    if fault["type"] == "literal_error" and isinstance(fault["input"], str):
        known = re.findall("'([^']+)'", fault["ctx"]["expected"])
        if close := difflib.get_close_matches(fault["input"], known, n=1):
            return f"{where}: {given} does not exist; did you mean {close[0]}?"
    return f"{where}: {said}, not {given}"


def _did_you_mean(location: tuple[str | int, ...]) -> str:
    *parents, unknown = location
    section: type[BaseModel] | None = Config
    for name in parents:
        section = _section_of(section, str(name))
    if section is None:
        return ""
    known = [field.alias or name for name, field in section.model_fields.items()]
    close = difflib.get_close_matches(str(unknown), known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"


def _section_of(section: type[BaseModel] | None, name: str) -> type[BaseModel] | None:
    if section is None or name not in section.model_fields:
        return None
    annotation = section.model_fields[name].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
