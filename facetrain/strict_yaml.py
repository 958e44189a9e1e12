"""Strict YAML reader: 5e-4 is a number, duplicate keys are errors, and no file can run code.

A subclass of PyYAML's SafeLoader.
"""

from __future__ import annotations

import re
from datetime import date
from typing import Any

import yaml

_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""Characters that the escapes of YAML can write: the end of a path, and halves of characters."""


_FLOAT = re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$")
"""Numbers that YAML 1.1, which requires a point in every float, would read as text."""
_OTHER_BASE = re.compile(r"[-+]?0[0-7_]+|.*:.*")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses aliases, which can expand to gigabytes, tags, and keys that are duplicate or not text."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not allowed; repeat the value", problem_mark=event.start_mark
            )
        if event.tag is not None:
            raise yaml.MarkedYAMLError(
                problem="tags (!name) are not allowed; write the value alone, a text in quotes",
                problem_mark=event.start_mark,
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

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and _NO_TEXT.search(value):
            raise yaml.MarkedYAMLError(
                problem="contains a character that no path and no text has", problem_mark=node.start_mark
            )
        return value

    def construct_yaml_int(self, node: Any) -> int:
        self._require_decimal(node)
        value = super().construct_yaml_int(node)
        if not -(2**63) <= value < 2**63:
            raise yaml.MarkedYAMLError(problem="a number has more than 64 bits", problem_mark=node.start_mark)
        return value

    def construct_yaml_float(self, node: Any) -> float:
        self._require_decimal(node)
        return float(super().construct_yaml_float(node))

    def _require_decimal(self, node: Any) -> None:
        if _OTHER_BASE.fullmatch(node.value):
            raise yaml.MarkedYAMLError(
                problem=f"YAML reads {node.value} as a number in base 8 or 60; write it in decimal, or text in quotes",
                problem_mark=node.start_mark,
            )


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes texts that the loader would read as numbers."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Between single quotes, PyYAML writes U+0085 as it is, and reads it as the end of a line.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\x85" in text else None)


_Dumper.add_representer(str, _represent_text)
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def dump_yaml(values: Any) -> str:
    """Return a YAML text of dicts, lists, strings and numbers, which `parse_yaml` reads as it was."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def dump_in_line(value: Any) -> str:
    """Return the YAML text of one value on one line, as `--set` takes it."""
    # In a list: PyYAML ends the text of a single number with a line of its own.
    return str(
        yaml.dump(
            [value],
            Dumper=_Dumper,
            sort_keys=False,
            allow_unicode=True,
            default_flow_style=True,
            width=1 << 30,
        )
    ).strip()[1:-1]


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text as dicts, lists, strings, numbers and dates.

    Raises:
        ValueError: the text is not valid YAML, or uses tags, aliases or duplicate keys; the message has the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{line}{error.problem}") from error
    except yaml.reader.ReaderError as error:
        code = f"#x{error.character:04x}"
        raise ValueError(f"contains a character that YAML does not allow ({code})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        # For example a date with a 13th month: the resolver recognizes it, and the constructor fails.
        raise ValueError(f"contains a value that is not valid YAML ({error})") from error


def lacks_quotes(value: Any) -> bool:
    """Return whether YAML may have made a value of a text without quotes: a number, a date, or true of `on`."""
    return isinstance(value, int | float | date)
