"""Numbers, names and paths as text, for messages and tables."""

from __future__ import annotations

import math
import os
import shlex
import unicodedata
from collections.abc import Iterable, Sequence

_OVERRIDES = frozenset(("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"))
_FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
_LONGEST_NAME = 60
_MOST_NAMES = 20
_LARGEST = 1e8
"""A loss that diverges reaches 1e30, which has 36 characters with four decimals."""
_MOST_DECIMALS = 9
"""Decimals of a rate: what is smaller is an error of float64, as no set has so many decisions."""


def count_text(number: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun: "1 rank", "2 ranks"."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def images_text(images: int, identities: int) -> str:
    """Return the size of a dataset: "1,200 images of 60 identities"."""
    return f"{count_text(images, 'image')} of {count_text(identities, 'identity', 'identities')}"


def percent(rate: float) -> str:
    """Return a rate in percent: "98.27%".

    Close to 0 and to 1, it has more digits: with 2 wrong decisions of 200,000, an accuracy must not read 100%. A zero
    has no sign, as in all numbers that facetrain prints (the `z` of a format).
    """
    distance = round(min(abs(rate), abs(1 - rate)), _MOST_DECIMALS)
    digits = max(2, math.ceil(-math.log10(distance)) - 1) if 0 < distance < 1 else 2
    return f"{rate:z.{digits}%}"


def number_text(value: float, form: str, *, smallest: float = 1e-3) -> str:
    """Format a number; with three digits if the form would leave none of a smaller one, or very many."""
    return format(value, form if smallest <= abs(value) < _LARGEST else ".3g")


def printable(text: str) -> str:
    """Return a text without characters that control a terminal or change the order of the others: they are escaped.

    Names of files, identities and images come from other people. An escape sequence in one could rewrite lines of
    the terminal, and a line break could forge a line of the log.
    """
    try:
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # half a character, which no name of a file can have, but JSON can
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if text.isprintable():
        return text
    return "".join(char.encode("unicode_escape").decode() if _is_control(char) else char for char in text)


def _is_control(char: str) -> bool:
    # Cf has the direction overrides (U+202A to U+202E, U+2066 to U+2069), but also joiners that some scripts need.
    return (
        unicodedata.category(char) in ("Cc", "Zl", "Zp", "Cs")
        or unicodedata.bidirectional(char) in _OVERRIDES
    )


def listed(names: Iterable[str]) -> str:
    """Return names from a file for a message: without control characters, long ones cut, the first ones of many."""
    names = list(names)
    shown = ", ".join(shortened(printable(name), _LONGEST_NAME) for name in names[:_MOST_NAMES])
    return shown + (f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else "")


def shortened(text: str, most: int) -> str:
    """Return a text, or its first characters if it has more than `most`."""
    return text if len(text) <= most else text[:most] + "..."


def shell_path(path: str | os.PathLike[str]) -> str:
    """Return a path as an argument of a command that a message shows: quoted, and never taken for an option."""
    text = os.fspath(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def spreadsheet_text(name: str) -> str:
    """Return a name that no spreadsheet computes: with an apostrophe before a sign that begins a formula.

    For names from other people in tables that people read (OWASP, "CSV injection"); `without_spreadsheet_mark` undoes
    it. Tables that are part of a dataset, such as names.csv, keep the names as they are.
    """
    return f"'{name}" if name.lstrip("'").startswith(_FORMULA_SIGNS) else name


def without_spreadsheet_mark(text: str) -> str:
    """Return the name from which `spreadsheet_text` has made a text."""
    return text[1:] if text.startswith("'") and text.lstrip("'").startswith(_FORMULA_SIGNS) else text


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
