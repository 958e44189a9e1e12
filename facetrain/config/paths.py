"""Paths and addresses in a config: absolute paths, downloads, and the folder of the evaluation sets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from facetrain.config.changes import lookup
from facetrain.config.loading import CONFIG_FILE, load_config, override_values, plain_config
from facetrain.config.schema import Config
from facetrain.data.settings import SET_SUFFIXES
from facetrain.errors import FacetrainError, UsageError
from facetrain.files import require_utf_8
from facetrain.remote.address import is_read_in_place, is_remote, public
from facetrain.remote.download import address_of, is_name, pinned

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


def eval_dir_of_run(model: Path) -> Path:
    """Return the evaluation folder of a run, or the current folder if `model` is not a run folder."""
    config = model / CONFIG_FILE
    return load_config(config).local_eval_dir if config.is_file() else Path()


def given_eval_dir(text: str) -> Path:
    """Return the folder of the evaluation sets that a command or a script gives beside the sets themselves.

    Raises:
        UsageError: it is an address.
    """
    if is_remote(text):
        folder = public(text).rstrip("/")
        raise UsageError(
            f"{folder}: names of sets belong to a folder of this machine; give the address of each set, such as "
            f"{folder}/lfw.bin"
        )
    return Path(text)


def with_absolute_paths(config: Config) -> Config:
    """Return the config with absolute paths, so that a run can be continued and evaluated from any folder.

    Relative paths are relative to the current folder. The names of evaluation sets in `eval.dir` stay as they are: only
    those that `with_paths_of_sets` has marked are paths.

    Raises:
        UsageError: an absolute path is not UTF-8, which may be the fault of the current folder.
    """
    plain = plain_config(config)
    paths = {key: path for key in _PATHS if (path := lookup(plain, key)) and not is_remote(path)}
    values: dict[str, Any] = {key: _absolute(path) for key, path in paths.items()}
    values["eval.targets"] = [
        _absolute(target) if target.startswith((".", "/")) else target for target in config.eval.targets
    ]
    return Config.model_validate(override_values(plain, values))


def _absolute(path: str) -> str:
    path = os.path.abspath(path)
    require_utf_8(path)
    return path


def with_paths_of_sets(config: Config) -> Config:
    """Return the config with "./" before each evaluation set that is a path, and not a name in `eval.dir`."""
    targets = [_marked(target, config.eval_dir) for target in config.eval.targets]
    return Config.model_validate(override_values(plain_config(config), {"eval.targets": targets}))


def address_of_set(target: str, eval_dir: str) -> str | None:
    """Return the address of an evaluation set: its own, or that of a name in a remote folder; None of a local set."""
    if is_remote(target):
        return target
    is_path = Path(target).name != target
    file = target if target.lower().endswith(SET_SUFFIXES) else f"{target}.bin"
    return None if is_path or not is_remote(eval_dir) else f"{eval_dir.rstrip('/')}/{file}"


def with_downloads(
    config: Config, pin: Callable[[str], str] = pinned, *, has_weights: bool = False
) -> Config:
    """Return the config with the versions of its addresses, after `pin` has downloaded what is not read in place.

    Args:
        config: the settings.
        pin: downloads an address or a name of the catalog; returns the address with its version.
        has_weights: whether the run continues from a checkpoint, which has the weights of `model.init_from`: this
            address gets no version.

    Raises:
        FacetrainError: an address cannot be used, or a download failed.
    """
    plain, values = plain_config(config), dict[str, Any]()
    for key in _DOWNLOADED:
        path = lookup(plain, key)
        is_restored = has_weights and key == "model.init_from"
        if path and is_name(path) and not (key == "data.train" and is_read_in_place(path)):
            values[key] = _pinned_for(key, path, address_of if is_restored else pin)
    addresses = [(target, address_of_set(target, config.eval_dir)) for target in config.eval.targets]
    values["eval.targets"] = [
        _pinned_for("eval.targets", address, pin) if address else target for target, address in addresses
    ]
    return Config.model_validate(override_values(plain, values))


def _pinned_for(key: str, address: str, pin: Callable[[str], str]) -> str:
    try:
        return pin(address)
    except FacetrainError as error:
        # A name of `eval.targets` becomes an address that the user has never written.
        advice = "; with `eval.targets: []` a run verifies nothing" if key == "eval.targets" else ""
        error.args = (f"{key}: {error}{advice}",)
        raise


def _marked(target: str, eval_dir: str) -> str:
    if is_remote(target) or target.startswith((".", "/")):
        return target
    has_folder = Path(target).name != target
    is_in_eval_dir = (Path(eval_dir) / target).exists()
    is_path = (
        Path(target).exists() and (has_folder or target.lower().endswith(SET_SUFFIXES)) and not is_in_eval_dir
    )
    return f"./{target}" if is_path else target
