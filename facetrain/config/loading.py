"""Config loading: merges a YAML file with what it extends, its recipe and --set, and checks the result."""

from __future__ import annotations

import copy
import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from facetrain.config.explain import explain, takes_text
from facetrain.config.presets import find_config, presets
from facetrain.config.schema import RECIPES, Config
from facetrain.errors import ConfigError
from facetrain.files import error_reason
from facetrain.remote.address import has_secrets, without_secrets
from facetrain.strict_yaml import dump_yaml, parse_yaml
from facetrain.text import printable, shell_path

CONFIG_FILE = "config.yaml"
"""File of a run folder with the config of the run."""
_MAX_EXTENDS = 16
_MAX_BYTES = 1 << 20
_KINDS = {list: "a list", bool: "a truth value", int: "a number", float: "a number"}
_RESET_BY_EMPTY = ("lora", "lr_factors", "muon", "options")
"""Keys that are null or `{}` by default: `{}` replaces what they hold. An empty section of others changes nothing."""


def load_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Load a config from a YAML file, or by the name of a preset.

    Later sources win: recipe, extended file, file, overrides (KEY=VALUE).

    Raises:
        ConfigError: with all faults in one line.
    """
    path = find_config(Path(path))
    return build_config(read_merged(path), str(path), overrides)


@cache
def preset_configs() -> dict[str, Config]:
    """Return the configs of all presets by name; they are read once."""
    return {preset.name: load_config(preset.path) for preset in presets()}


def build_config(values: dict[str, Any], where: str, overrides: Iterable[str] = ()) -> Config:
    """Build a config from plain values, with the defaults of the recipe below them and the overrides above.

    `where` names the source of the values in errors.

    Raises:
        ConfigError: with all faults in one line.
    """
    changes, values = [_parse_override(override) for override in overrides], copy.deepcopy(values)
    for change in changes:
        _merge(values, change)
    _require_no_secrets(values, where)
    # After --set, which may choose another recipe; below the file, whose keys win over it.
    recipe = values.get("recipe", Config.model_fields["recipe"].default)
    # A deep copy: the merge changes it.
    merged = copy.deepcopy(RECIPES.get(recipe, {}) if isinstance(recipe, str) else {})
    _merge(merged, values)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        where += " and the command line" if changes else ""
        raise ConfigError(f"{where}: {explain(error, merged)}") from error


def _require_no_secrets(values: Any, where: str, key: str = "") -> None:
    """Check that no address in the values has a password or a signature: the config is written to many files.

    Raises:
        ConfigError: one has.
    """
    if isinstance(values, str) and has_secrets(values):
        raise ConfigError(
            f"{where}: {key}: {printable(without_secrets(values))} has a user, a password or a query, which a config "
            "must not have; give credentials by the environment, or download the file by `facetrain get`"
        )
    items = (
        values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    )
    for name, value in items:
        _require_no_secrets(value, where, f"{key}.{name}" if key else str(name))


def plain_config(config: Config) -> dict[str, Any]:
    """Return all keys and values as JSON types."""
    # By way of JSON: tuples become lists, which is what YAML and a checkpoint hold.
    plain: dict[str, Any] = json.loads(config.model_dump_json(by_alias=True))
    return plain


def dump_config(config: Config) -> str:
    """Return a YAML text with all keys, from which the same config is loaded."""
    return dump_yaml(plain_config(config))


def read_merged(path: Path, _seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file, merged over the file that it extends.

    Raises:
        ConfigError: a file does not exist, is not valid, or extends itself.
    """
    # Not Path.resolve: it raises a RuntimeError for a link to itself, which the reader below reports.
    real = Path(os.path.realpath(path))
    # A message names the first file as it was given, and those that it extends by their full paths.
    path = real if _seen else path
    if real in _seen or len(_seen) >= _MAX_EXTENDS:
        chain = " → ".join(str(seen) for seen in _seen)
        raise ConfigError(f"{path}: extends itself ({chain}); remove one `extends`")
    values = _read(path, is_extended=bool(_seen))
    parent = values.pop("extends", None)
    if parent is None:
        return values
    if not isinstance(parent, str):
        raise ConfigError(
            f"{path}: extends: {json.dumps(parent, default=str)} is invalid; use the name of one file"
        )
    # Relative to the file that extends it, so that a folder of configs can be moved as a whole.
    base = read_merged(path.parent / parent, (*_seen, real))
    _merge(base, values)
    return base


def _read(path: Path, *, is_extended: bool = False) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: the file does not exist, is too large for a config, or does not hold a mapping.
    """
    try:
        if path.exists() and not path.is_file():  # reading a device would not end
            raise ConfigError(f"{path}: is not a file; give the path of a YAML file, or the name of a preset")
        if path.suffix == ".py" and path.is_file():
            command = f"facetrain config convert {shell_path(path)} > {shell_path(f'{path.stem}.yaml')}"
            raise ConfigError(f"{path}: is a Python file; `{command}` converts a config of arcface_torch")
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise ConfigError(
                f"{path}: has {size:,} bytes, too many for a config (at most {_MAX_BYTES:,}); is it another file?"
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        advice = "`facetrain config list` shows the presets"
        if is_extended:
            advice = "`extends` takes a file; `facetrain config show PRESET > FILE` writes that of a preset"
        raise ConfigError(f"{path}: no such file{_similar_files(path)}; {advice}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error_reason(error)}") from error
    return parse_values(text, str(path))


def parse_values(text: str, where: str) -> dict[str, Any]:
    """Return the mapping in a YAML text; `where` names the text in errors.

    Raises:
        ConfigError: the text is not YAML, is empty, or does not hold a mapping.
    """
    values = _parse(text, where)
    if values is None:
        raise ConfigError(f"{where}: is empty; a config needs `key: value` lines, and at least data.train")
    if not isinstance(values, dict):
        raise ConfigError(
            f"{where}: is {_KINDS.get(type(values), 'text')}, but a config has `key: value` lines"
        )
    return values


def _parse(text: str, where: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _similar_files(path: Path) -> str:
    """Return a hint with the files of the same folder that have similar names."""
    names = [other.name for other in sorted(path.parent.glob("*.yaml"))]
    similar = difflib.get_close_matches(path.name, names, n=3)
    return f"; did you mean {' or '.join(str(path.parent / name) for name in similar)}?" if similar else ""


def values_of_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the values that overrides (KEY=VALUE) set, as sections with their keys.

    Raises:
        ConfigError: one has another form.
    """
    values = dict[str, Any]()
    for override in overrides:
        _merge(values, _parse_override(override))
    return values


def override_keys(overrides: Iterable[str]) -> frozenset[str]:
    """Return the dotted keys that overrides (KEY=VALUE) set; of a section, those of the mapping in it, if any."""
    return frozenset(key for override in overrides for key in _leaves(_parse_override(override)))


def is_within(key: str, section: str) -> bool:
    """Return whether a dotted key is a section or inside it."""
    return key == section or key.startswith(f"{section}.")


def is_set(set_keys: Iterable[str], *keys: str) -> bool:
    """Return whether one of the keys or sections is among those that a command sets, or is inside or around one."""
    return any(is_within(key, each) or is_within(each, key) for key in keys for each in set_keys)


def _leaves(values: dict[str, Any], section: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and (value or key not in _RESET_BY_EMPTY):
            yield from _leaves(value, f"{section}{key}.")
        else:
            yield f"{section}{key}"


def with_values(config: Config, values: Mapping[str, Any], where: str) -> Config:
    """Return a config with other values of some dotted keys; `where` names their source in errors.

    Raises:
        ConfigError: a value is not allowed.
    """
    return build_config(override_values(plain_config(config), values), where) if values else config


def override_values(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge overrides into the values of a config: sections as nested mappings, or single values by dotted keys."""
    for key, value in overrides.items():
        _merge(values, _nested(key, value))
    return values


def _merge(under: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Merge `over` into `under`: mappings by key, everything else is replaced."""
    for key, value in over.items():
        is_reset = value == {} and key in _RESET_BY_EMPTY
        if isinstance(value, dict) and isinstance(under.get(key), dict) and not is_reset:
            _merge(under[key], value)
        else:
            under[key] = value


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not all(part.isidentifier() for part in key.strip().split(".")):
        raise ConfigError(f"--set {override}: use the form KEY=VALUE, for example --set optim.lr=0.2")
    value = _parse(text, f"--set {key}")
    if takes_text(key.strip()) and value is not None and not isinstance(value, str | list | dict):
        # A commit such as 12e4567, or a date, as it was written; without a comment of YAML.
        value = re.split(r"\s#", text)[0].strip()
    return _nested(key.strip(), value)


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for the key "a.b"."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)
