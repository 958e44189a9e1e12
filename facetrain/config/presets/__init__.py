"""Configs that come with facetrain, and their lookup by name."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import NamedTuple

from facetrain.errors import ConfigError
from facetrain.files import packaged_folder

PRESET_FOLDER = packaged_folder(Path(__file__).parent, Path(__file__).parents[3] / "configs")
_FOLDERS_IN_NAMES = (Path(), Path("configs"))
_SUFFIXES = ("", ".yaml", ".yml")
_EXTENDS = re.compile(r"^extends: (\S+)$", re.MULTILINE)
_GPUS = re.compile(r"^# .*\b[Oo]n (\d+) GPUs?\b", re.MULTILINE)
_PUBLISHED = {
    r"^# Published by \w+: ([\d.]+) % TAR at FAR 1e-4 on IJB-C": "{} % IJB-C TAR@1e-4",
    r"^# .*\bmean ([\d.]+\d)": "{} % mean of five sets",
    r"^# Published .*LFW / CFP-FP / AgeDB-30: ([\d./ ]+\d)": "{} LFW / CFP-FP / AgeDB-30",
}
"""Patterns of a published result in a comment, in the order of preference, with its text in the list of presets."""


class Preset(NamedTuple):
    """Config that comes with facetrain."""

    name: str
    path: Path
    gpus: int | None
    """Number of GPUs that the batch size is meant for, from a comment; None if any number will do."""
    published: str
    """Published result, from a comment; empty if there is none."""


def presets() -> list[Preset]:
    """Return all presets, sorted by name."""
    return [_preset(path) for path in sorted(PRESET_FOLDER.glob("*.yaml"), key=lambda path: path.stem)]


def find_config(path: Path) -> Path:
    """Return the path of a config that is given as a path or as the name of a preset. An existing file wins.

    NAME, NAME.yaml and configs/NAME.yaml are names of a preset. A path that is neither is returned as it is.

    Raises:
        ConfigError: no preset has the name, but several begin with it, or some have similar names.
    """
    name = path.stem
    if path.is_file() or path.suffix not in _SUFFIXES or path.parent not in _FOLDERS_IN_NAMES:
        return path
    known = {preset.name: preset.path for preset in presets()}
    if name in known:
        return known[name]
    matches = [other for other in known if other.startswith(name)]
    if len(matches) > 1:
        raise ConfigError(f"{path}: several presets begin with this name; give one of: {', '.join(matches)}")
    if similar := matches or difflib.get_close_matches(name, known, n=3):
        raise ConfigError(f"{path}: no such file or preset; did you mean {' or '.join(similar)}?")
    return path


def _preset(path: Path) -> Preset:
    text = _text_with_extended_files(path)
    gpus = _GPUS.search(text)
    found = ((re.search(pattern, text, re.MULTILINE), words) for pattern, words in _PUBLISHED.items())
    published = next((words.format(match[1]) for match, words in found if match), "")
    return Preset(path.stem, path, int(gpus[1]) if gpus else None, published)


def _text_with_extended_files(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    parent = _EXTENDS.search(text)
    return text + _text_with_extended_files(path.parent / parent[1]) if parent else text
