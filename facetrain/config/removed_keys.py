"""Keys of configs of older versions, which the folders of their runs still have."""

from __future__ import annotations

from typing import Any

from facetrain.errors import ConfigError

_WITHOUT_EFFECT: dict[str, tuple[tuple[object, ...], str]] = {
    "train.cuda_graphs": (
        ("auto", "off", False),
        "set train.compile to reduce-overhead, with which torch replays CUDA graphs",
    ),
    "run.commercial": ((False, True), "read the licenses in the cards of the datasets"),
    "model.quantize": (
        (None,),
        "train in float32, and export the model with `facetrain export --int8 static`",
    ),
}
"""Removed key -> the values that can be ignored, and what to do about another one."""
_NEW_VALUES: dict[str, dict[object, object]] = {"train.compile": {"auto": "off"}}
"""Key -> removed value -> the value that stands for it now."""


def update_removed_keys(values: dict[str, Any], where: str) -> None:
    """Remove keys of older versions from the plain values of a config, and replace values that no longer exist.

    Raises:
        ConfigError: a removed key has a value that changed the run. `where` names the source of the values.
    """
    for key, (ignored, advice) in _WITHOUT_EFFECT.items():
        section, name = _find(values, key)
        if name in section and section[name] not in ignored:
            raise ConfigError(f"{where}: {key}: {section[name]} was removed; {advice}")
        section.pop(name, None)
    for key, replacements in _NEW_VALUES.items():
        section, name = _find(values, key)
        value = section.get(name)
        if isinstance(value, str) and value in replacements:
            section[name] = replacements[value]


def _find(values: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the section of a dotted key, an empty one if it is absent, and the name of the key in it."""
    place, _, name = key.partition(".")
    section = values.get(place)
    return (section, name) if isinstance(section, dict) else ({}, name)
