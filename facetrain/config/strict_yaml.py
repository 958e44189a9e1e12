"""YAML as people mean it: 5e-4 is a number, a key stands once, and nothing in a file can run."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml

from facetrain.errors import ConfigError

MAX_BYTES = 1 << 20
_SAID = {list: "list", bool: "yes or no", int: "number", float: "number"}


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases (which can unfold to gigabytes), and strict about keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="an alias (*name) stands here", problem_mark=self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is not a word", problem_mark=key_node.start_mark
                )
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key} stands twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a point in every float and would read 5e-4 as a word.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def parse(text: str, where: str) -> Any:
    """Return what a YAML text says, as dicts, lists, strings and numbers.

    Raises:
        ConfigError: it is not YAML, or uses tags, aliases or a key twice; the message names the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: {error.problem}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from error


def read(path: Path) -> dict[str, Any]:
    """Return the mapping that a YAML file holds.

    Raises:
        ConfigError: there is no such file, it is larger than a run description can be, or no mapping.
    """
    try:
        if path.exists() and not path.is_file():  # a device has no end
            raise ConfigError(f"{path}: is no file")
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: {path.stat().st_size:,} bytes are too many for a run description")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: {error.strerror}{_near(path)}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 (byte {error.start})") from error
    value = parse(text, str(path))
    if value is None:
        raise ConfigError(f"{path}: is empty; a run description has `key: value` lines, data.train at least")
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {_SAID.get(type(value), 'word')}, not `key: value` lines")
    return value


def _near(path: Path) -> str:
    """Name the run descriptions of the same folder, or of configs/, whose names are alike."""
    for folder in (path.parent, Path("configs")):
        names = [other.name for other in sorted(folder.glob("*.yaml"))]
        close = difflib.get_close_matches(path.name, names, n=3)
        if close:
            return f"; did you mean {' or '.join(str(folder / name) for name in close)}?"
    return ""
