"""Numbers in the names of shards: a missing one would leave out its images in silence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from facetrain.errors import DataError
from facetrain.files import printable

_OF_COUNT = re.compile(r"(?P<before>.*?)(?P<number>\d{5,})(?P<after>-of-(?P<count>\d{5,}).*)", re.ASCII)
"""train-00000-of-00003.parquet: the name has the number of shards."""
_PADDED = re.compile(r"(?P<before>.*?)(?P<number>\d{3,})(?P<after>\D*)", re.ASCII)
"""shard-000000.tar: numbers of equal width, of which one begins with a zero; others may be dates or sizes."""


def require_all_shards(paths: Sequence[Path]) -> None:
    """Check that no number is missing in the names of the shards of a folder.

    Raises:
        DataError: a shard is missing; the message names it.
    """
    sets: dict[tuple[str, int, str], set[int]] = {}
    counts: dict[tuple[str, int, str], int] = {}
    for path in paths:
        match = _OF_COUNT.fullmatch(path.name) or _PADDED.fullmatch(path.name)
        if match is None:
            continue
        series = (match["before"], len(match["number"]), match["after"])
        sets.setdefault(series, set()).add(int(match["number"]))
        if "count" in match.groupdict():
            counts[series] = int(match["count"])
    for series, numbers in sets.items():
        first, end = min(numbers), max(numbers) + 1
        if series in counts:
            first = 1 if counts[series] in numbers else 0  # some programs count from 1
            end = counts[series] + first
        elif len(str(first)) == series[1]:
            continue
        if len(numbers) < end - first:
            _refuse(paths[0].parent, series, numbers, range(first, end))


def _refuse(folder: Path, series: tuple[str, int, str], numbers: set[int], expected: range) -> None:
    before, width, after = series
    missing = next(number for number in expected if number not in numbers)
    others = len(expected) - len(numbers) - 1
    raise DataError(
        f"{folder}: {printable(f'{before}{missing:0{width}}{after}')} is missing"
        + (f", and {others:,} more shards" if others else "")
        + "; download it again, or give the shards other names if the set is complete without it"
    )
