"""Comparison of the config of a resumed run with the one in its checkpoint, made before anything is built."""

from __future__ import annotations

import json
import shlex
from collections.abc import Set
from typing import Any

from facetrain.backbone.registry import BACKBONES
from facetrain.checkpoint.load import Checkpoint
from facetrain.config.changes import ConfigChange, differences, lookup
from facetrain.config.loading import build_config, is_set, is_within, parse_values, plain_config
from facetrain.config.schema import Config
from facetrain.errors import ConfigError
from facetrain.remote.address import without_version
from facetrain.strict_yaml import dump_in_line

_NETWORK_KEYS = (
    "data.image_size",
    "model.backbone",
    "model.layers",
    "model.widths",
    "model.stem_stride",
    "model.embedding_size",
)
"""Config keys that decide names and shapes of the network's weights."""
_SHAPING_KEYS = (
    *_NETWORK_KEYS,
    "model.lora",
    "head.momentum_dtype",
    "optim.name",
    "optim.momentum",
    "optim.muon",
)
"""Config keys that decide names, shapes, dtypes and meaning of the tensors in a checkpoint.

SGD and Muon have moments of the same shapes: sums of gradients, and their averages, which are ten times smaller.
"""
_MEANING_KEYS = (
    "seed",
    "head.margin",
    "distill",
    "optim.muon",
    "train.stages",
    "head.expectations",
    "head.expectation_margin",
)
"""Config keys and sections without which a run is another one: they change only with --set."""
_PATH_KEYS = ("distill.teacher", "distill.cache")
"""Exceptions among them: files that are recognized by their digests, wherever they lie."""
INITIAL_KEYS = ("model.init_from", "model.init_blocks", "head.init_from")
"""Config keys that decide the first weights of a run."""


def find_config_changes(checkpoint: Checkpoint, config: Config) -> list[ConfigChange]:
    """Return the config keys whose values are not those with which the checkpoint was trained, in their order.

    A section that only one of the two configs has is one change.

    Raises:
        ConfigError: the config in the checkpoint is one of another version.
    """
    # Both with their defaults, so that a key counts as changed only if its value is another one.
    saved = saved_config(checkpoint)
    return list(differences(plain_config(saved), plain_config(config))) if saved else []


def check_meaning(checkpoint: Checkpoint, changes: list[ConfigChange], set_keys: Set[str]) -> None:
    """Check that a config that was edited still describes the same run.

    Args:
        checkpoint: the checkpoint that the run continues from.
        changes: the keys whose values differ.
        set_keys: keys and sections that the command line sets: they change on purpose.

    Raises:
        ConfigError: the seed, the margin or the loss is another, and not by `--set`; or the recipe is another.
    """
    if recipe := [change for change in changes if change.key == "recipe"]:
        raise ConfigError(
            f"{recipe[0]}: a recipe gives the defaults of keys when a run starts; restore it, and change the keys "
            "themselves with --set"
        )
    refused = [
        change
        for change in changes
        if any(is_within(change.key, key) for key in _MEANING_KEYS)
        and change.key not in _PATH_KEYS
        and not is_set(set_keys, change.key)
    ]
    if refused:
        options = " ".join(
            f"--set {shlex.quote(f'{change.key}={dump_in_line(change.now)}')}" for change in refused
        )
        raise ConfigError(
            f"{', '.join(map(str, refused))}: {checkpoint.folder} was trained with the values before the arrows; "
            f"restore them in the config, or change them on purpose with {options}"
        )


def check_initial(changes: list[ConfigChange], set_keys: Set[str]) -> None:
    """Check that `facetrain resume` does not set what has an effect only when a run starts.

    A start with `--resume` may: its command is the one that began the run.

    Args:
        changes: the keys whose values differ from the checkpoint.
        set_keys: keys and sections that the command line sets.

    Raises:
        ConfigError: it does.
    """
    for change in changes:
        if change.key in INITIAL_KEYS and is_set(set_keys, change.key):
            raise ConfigError(
                f"{change}: decides the first weights of a run, and a resume has those of its checkpoint; remove the "
                "--set, or start a new run"
            )


def describe_initial(changes: list[ConfigChange]) -> list[str]:
    """Return lines that say that changed values of `INITIAL_KEYS` have no effect.

    There is none for an address that differs from the recorded one by its version alone: the command that began the
    run has it.
    """
    return [
        f"{each.key}: {json.dumps(each.now)} has no effect: the run has begun with {json.dumps(each.before)}"
        for each in changes
        if without_version(str(each.before)) != without_version(str(each.now))
    ]


def check_compatibility(checkpoint: Checkpoint, config: Config, *, total_steps: int) -> None:
    """Check that a run with this config can continue from a checkpoint.

    Args:
        checkpoint: the checkpoint, of which only the metadata is read.
        config: the config of the run that continues.
        total_steps: last step of the run that continues.

    Raises:
        ConfigError: the tensors of the checkpoint do not fit, or its step is past the end of the run. The message
            names the key.
    """
    model = checkpoint.meta.get("model")
    saved = model.get("config") if isinstance(model, dict) else None
    current = plain_config(config)
    for key in _SHAPING_KEYS:
        before, now = _shaping_value(saved, key), _shaping_value(current, key)
        if saved is not None and before != now:
            before, now = ("null" if value is None else value for value in (before, now))
            # The weights do not fit another network, but every network can learn from this one.
            new_run = (
                "that learns from this one by distill.teacher"
                if key in _NETWORK_KEYS
                else "from these weights with model.init_from"
            )
            raise ConfigError(
                f"{key}: {checkpoint.folder} was trained with {before}, and cannot continue with {now}; keep "
                f"{before}, or start a new run {new_run}"
            )
    # A run ends when it reaches its last step exactly: one that starts past it would never end.
    if checkpoint.step > total_steps:
        raise ConfigError(
            f"{checkpoint.folder}: the checkpoint is past step {total_steps:,}, the end of the run by train.epochs, "
            "train.max_steps and the global batch; raise them, or continue from an earlier step with `facetrain resume "
            "RUN_DIR --checkpoint STEP`"
        )


def saved_config(checkpoint: Checkpoint) -> Config | None:
    """Return the config in a checkpoint; None if it has none.

    Raises:
        ConfigError: it has a key or a value that this version does not know, and could not be compared.
    """
    text, where = checkpoint.meta.get("config"), f"{checkpoint.folder}: its config"
    if not isinstance(text, str):
        return None
    try:
        # Keys that this version has added get their defaults.
        return build_config(parse_values(text, where), where)
    except ConfigError as error:
        raise ConfigError(f"{error}; continue the run with the version of facetrain that wrote it") from error


def _shaping_value(config: Any, key: str) -> Any:
    """Return the value of a dotted key; of null the published blocks, or the stride, that it means."""
    value = lookup(config, key)
    if value is None and key in ("model.layers", "model.stem_stride"):
        architecture, name = BACKBONES.get(str(lookup(config, "model.backbone"))), key.removeprefix("model.")
        if architecture is None or name not in architecture.changeable:
            return None
        published = architecture.arguments.get(name)
        return list(published) if isinstance(published, tuple) else published
    if key == "optim.momentum" and value is not None:
        if lookup(config, "optim.name") != "sgd":
            return None  # it has no effect
        return "0" if value == 0 else "a value above 0"  # which value does not matter for the tensors
    if key == "optim.muon" and value is not None:
        return "Muon"  # with which values does not matter for the tensors
    return value
