"""Strict YAML reader: 5e-4 is a number, duplicate keys are errors, and no file can run code.

A subclass of PyYAML's SafeLoader. Its errors are translated, because PyYAML's speak of its tokens.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

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
        raise ValueError(f"{line}{_translate(error.problem or '')}") from error
    except yaml.reader.ReaderError as error:
        code = f"#x{error.character:04x}"
        raise ValueError(f"contains a character that YAML does not allow ({code})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except (yaml.YAMLError, ValueError, AttributeError, KeyError, TypeError, OverflowError) as error:
        # For example a date with a 13th month, or `!!bool x`: the resolver recognizes it, and the constructor fails.
        raise ValueError(f"contains a value that is not valid YAML ({error})") from error


def _translate(problem: str) -> str:
    for pattern, message in _MESSAGES:
        if match := re.search(pattern, problem):
            return message.format(*match.groups())
    # The loader's own problems are plain, and the rest of PyYAML's rare.
    return problem
