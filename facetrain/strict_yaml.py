"""Strict YAML reader: 5e-4 is a number, duplicate keys are errors, and no file can run code.

A subclass of PyYAML's SafeLoader.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""Characters that the escapes of YAML can write: the end of a path, and halves of characters."""


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

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and _NO_TEXT.search(value):
            raise yaml.MarkedYAMLError(
                problem="contains a character that no path and no text has", problem_mark=node.start_mark
            )
        return value

    def construct_yaml_int(self, node: Any) -> int:
        value = super().construct_yaml_int(node)
        if not -(2**63) <= value < 2**63:
            raise yaml.MarkedYAMLError(problem="a number has more than 64 bits", problem_mark=node.start_mark)
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
# YAML 1.1 requires a point in every float, and would read 5e-4 as text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


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
    except (yaml.YAMLError, ValueError, AttributeError, KeyError, TypeError, OverflowError) as error:
        # For example a date with a 13th month, or `!!bool x`: the resolver recognizes it, and the constructor fails.
        raise ValueError(f"contains a value that is not valid YAML ({error})") from error
