"""Strict YAML reader: 5e-4 is a number, duplicate keys are errors, and no file can run code.

A subclass of PyYAML's SafeLoader. Its errors are translated, because PyYAML's speak of its tokens.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml

from facetrain.errors import ConfigError
from facetrain.files import error_reason, shell_path

MAX_BYTES = 1 << 20

_KINDS = {list: "a list", bool: "a truth value", int: "a number", float: "a number"}
_MESSAGES = (
    (r"found character '\\t'", "a tab is not allowed here; indent with spaces"),
    (r"found character '(.)' that cannot start", r"a value cannot start with {0}; put it in quotes"),
    ("could not determine a constructor", "tags (!name) are not allowed; remove the tag"),
    ("mapping values are not allowed", "unexpected ':'; put text that contains ': ' in quotes"),
    (r"expected ',' or '([\]}])'", "',' or '{0}' is missing"),
    ("could not find expected ':'", "':' is missing after the key"),
    (
        "expected <block end>, but found|expected '<document start>'",
        "the line does not continue what is above it; check its indentation and the brackets",
    ),
    ("found unexpected end of stream", "a quote is not closed"),
    ("unknown escape character|expected escape sequence", "invalid escape sequence; use single quotes"),
    ("expected alphabetic or numeric character", "text that begins with & or * must be in quotes"),
    ("found another document", "only one document is allowed; remove the line `---`"),
)
"""Patterns of PyYAML's problems, with our messages; groups of the pattern fill the braces."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses aliases, which can expand to gigabytes, and keys that are duplicate or not text."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not allowed; repeat the value", problem_mark=mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        # PyYAML would keep the last of two equal keys without a word.
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            mark = key_node.start_mark
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is not text; put it in quotes", problem_mark=mark
                )
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"duplicate key {key}; remove one of the two", problem_mark=mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 requires a point in every float, and would read 5e-4 as text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse(text: str, where: str) -> Any:
    """Return the value of a YAML text as dicts, lists, strings and numbers; `where` names the text in errors.

    Raises:
        ConfigError: the text is not valid YAML, or uses tags, aliases or duplicate keys; the message has the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: {_translate(error.problem or '')}") from error
    except yaml.reader.ReaderError as error:
        code = f"#x{error.character:04x}"
        raise ConfigError(f"{where}: contains a character that YAML does not allow ({code})") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        # For example a date with a 13th month: the resolver recognizes it, and the constructor fails.
        raise ConfigError(
            f"{where}: contains a value that is not valid YAML ({error_reason(error)})"
        ) from error


def read(path: Path) -> dict[str, Any]:
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
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ConfigError(f"{path}: has {size:,} bytes, too many for a config (at most {MAX_BYTES:,})")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such file{_similar_files(path)}; `facetrain config list` shows the presets"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: {error_reason(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a text file in UTF-8 (byte {error.start})") from error
    value = parse(text, str(path))
    if value is None:
        raise ConfigError(f"{path}: is empty; a config needs `key: value` lines, and at least data.train")
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: is {_KINDS.get(type(value), 'text')}, but a config has `key: value` lines"
        )
    return value


def _translate(problem: str) -> str:
    for pattern, message in _MESSAGES:
        if match := re.search(pattern, problem):
            return message.format(*match.groups())
    # The loader's own problems are plain, and the rest of PyYAML's rare.
    return problem


def _similar_files(path: Path) -> str:
    """Return a hint with the files of the same folder that have similar names."""
    names = [other.name for other in sorted(path.parent.glob("*.yaml"))]
    similar = difflib.get_close_matches(path.name, names, n=3)
    return f"; did you mean {' or '.join(str(path.parent / name) for name in similar)}?" if similar else ""
