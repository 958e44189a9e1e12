"""Config loading: merges a YAML file with what it extends, its recipe and --set, and checks the result."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from facetrain.config.explain import explain
from facetrain.config.presets import find_config, presets
from facetrain.config.schema import RECIPES, Config
from facetrain.errors import ConfigError, FacetrainError
from facetrain.files import error_reason, printable, shell_path
from facetrain.remote.address import has_secrets, is_read_in_place, is_remote, without_secrets
from facetrain.remote.download import is_name, pinned
from facetrain.strict_yaml import dump_yaml, parse_yaml

CONFIG_FILE = "config.yaml"
"""File of a run folder with the config of the run."""
MAX_EXTENDS = 16
_MAX_BYTES = 1 << 20
_KINDS = {list: "a list", bool: "a truth value", int: "a number", float: "a number"}
_PATHS = (
    "run.dir",
    "data.train",
    "data.cache",
    "model.init_from",
    "distill.teacher",
    "distill.cache",
    "eval.dir",
)
"""Keys that hold a path. `eval.targets` has paths and names."""
_DOWNLOADED = ("data.train", "model.init_from", "distill.teacher", "distill.cache")
"""Keys that may hold an address or a name of the catalog."""
_RESET_BY_EMPTY = ("lr_factors", "muon", "options")
"""Keys of mappings without defaults: `{}` removes what is in them. An empty section changes nothing."""


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
    changes = [_parse_override(override) for override in overrides]
    for change in changes:
        _merge(values, change)
    _require_no_secrets(values, where)
    # After --set, which may choose another recipe; below the file, whose keys win over it.
    recipe = values.get("recipe", Config.model_fields["recipe"].default)
    # A deep copy: the merge changes it.
    merged = json.loads(json.dumps(RECIPES.get(recipe, {}) if isinstance(recipe, str) else {}))
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


def eval_dir_of_run(model: Path) -> Path:
    """Return the evaluation folder of a run, or the current folder if `model` is not a run folder."""
    config = model / CONFIG_FILE
    folder = load_config(config).eval_dir if config.is_file() else ""
    return Path() if is_remote(folder) else Path(folder)


def with_absolute_paths(config: Config) -> Config:
    """Return the config with absolute paths, so that a run can be continued and evaluated from any folder.

    Relative paths are relative to the current folder. The names of evaluation sets in `eval.dir` stay as they are: only
    those that `with_paths_of_sets` has marked are paths.
    """
    plain = plain_config(config)
    for key in _PATHS:
        section, _, name = key.partition(".")
        if (path := _value(plain, key)) and not is_remote(path):
            plain[section][name] = os.path.abspath(path)
    plain["eval"]["targets"] = [
        os.path.abspath(target) if target.startswith((".", "/")) else target for target in config.eval.targets
    ]
    return Config.model_validate(plain)


def with_paths_of_sets(config: Config) -> Config:
    """Return the config with "./" before each evaluation set that is a path, and not a name in `eval.dir`."""
    plain = plain_config(config)
    plain["eval"]["targets"] = [_marked(target, config.eval_dir) for target in config.eval.targets]
    return Config.model_validate(plain)


def with_downloads(
    config: Config, pin: Callable[[str], str] = pinned, *, has_weights: bool = False
) -> Config:
    """Return the config with the versions of its addresses, after `pin` has downloaded what is not read in place.

    Args:
        config: the settings.
        pin: downloads an address or a name of the catalog; returns the address with its version.
        has_weights: whether the run continues from a checkpoint, which has the weights of `model.init_from`.

    Raises:
        FacetrainError: an address cannot be used, or a download failed.
    """
    plain = plain_config(config)
    for key in _DOWNLOADED:
        section, _, name = key.partition(".")
        path = _value(plain, key)
        if has_weights and key == "model.init_from":
            continue
        if path and is_name(path) and not (key == "data.train" and is_read_in_place(path)):
            plain[section][name] = _pinned_for(key, path, pin)
    targets: list[str] = plain["eval"]["targets"]
    if is_remote(folder := config.eval_dir):
        targets = [
            each if is_remote(each) else f"{folder}/{each.removesuffix('.bin')}.bin" for each in targets
        ]
    plain["eval"]["targets"] = [
        _pinned_for("eval.targets", target, pin) if is_remote(target) else target for target in targets
    ]
    return Config.model_validate(plain)


def _pinned_for(key: str, address: str, pin: Callable[[str], str]) -> str:
    try:
        return pin(address)
    except FacetrainError as error:
        # A name of `eval.targets` becomes an address that the user has never written.
        error.args = (f"{key}: {error}",)
        raise


def _marked(target: str, eval_dir: str) -> str:
    if is_remote(target) or target.startswith((".", "/")):
        return target
    has_folder = Path(target).name != target
    is_in_eval_dir = (Path(eval_dir) / target).exists()
    is_path = Path(target).exists() and (has_folder or target.endswith(".bin")) and not is_in_eval_dir
    return f"./{target}" if is_path else target


def _value(plain: dict[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None if its section is null."""
    section, _, name = key.partition(".")
    return (plain[section] or {}).get(name)


def read_merged(path: Path, _seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file, merged over the file that it extends.

    Raises:
        ConfigError: a file does not exist, is not valid, or extends itself.
    """
    # Not Path.resolve: it raises a RuntimeError for a link to itself, which the reader below reports.
    real = Path(os.path.realpath(path))
    # A message names the first file as it was given, and those that it extends by their full paths.
    path = real if _seen else path
    if real in _seen or len(_seen) >= MAX_EXTENDS:
        chain = " → ".join(str(seen) for seen in _seen)
        raise ConfigError(f"{path}: extends itself ({chain}); remove one `extends`")
    values = _read(path)
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


def _read(path: Path) -> dict[str, Any]:
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
            raise ConfigError(f"{path}: has {size:,} bytes, too many for a config (at most {_MAX_BYTES:,})")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such file{_similar_files(path)}; `facetrain config list` shows the presets"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: {error_reason(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a text file in UTF-8 (byte {error.start})") from error
    value = _parse(text, str(path))
    if value is None:
        raise ConfigError(f"{path}: is empty; a config needs `key: value` lines, and at least data.train")
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: is {_KINDS.get(type(value), 'text')}, but a config has `key: value` lines"
        )
    return value


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


def override_keys(overrides: Iterable[str]) -> frozenset[str]:
    """Return the dotted keys that overrides (KEY=VALUE) set; of a section, those of the mapping in it."""
    return frozenset(key for override in overrides for key in _leaves(_parse_override(override)))


def _leaves(values: dict[str, Any], section: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
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
    return _nested(key.strip(), _parse(text, f"--set {key}"))


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for the key "a.b"."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)
