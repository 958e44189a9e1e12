"""Numbers in the names of shards: a missing one would leave out its images in silence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from facetrain.errors import DataError
from facetrain.text import printable

_OF_COUNT = re.compile(r"(?P<before>.*?)(?P<number>\d{5,})(?P<after>-of-(?P<count>\d{5,}).*)", re.ASCII)
"""train-00000-of-00003.parquet: the name has the number of shards."""
_PADDED = re.compile(r"(?P<before>.*?)(?P<number>\d{3,})(?P<after>(?P<count>)\D*)", re.ASCII)
"""shard-000000.tar: numbers of equal width, of which one begins with a zero; others may be dates or sizes."""


def require_all_shards(paths: Sequence[Path]) -> None:
    """Check that no number is missing in the names of the shards of a folder.

    Raises:
        DataError: a shard is missing; the message names it.
    """
    series: dict[tuple[str, int, str, str], set[int]] = {}
    for path in paths:
        if match := _OF_COUNT.fullmatch(path.name) or _PADDED.fullmatch(path.name):
            key = match["before"], len(match["number"]), match["after"], match["count"]
            series.setdefault(key, set()).add(int(match["number"]))
    for (before, width, after, count), numbers in series.items():
        expected = range(min(numbers), max(numbers) + 1)
        if count:
            first = int(int(count) in numbers)  # some programs count from 1
            expected = range(first, int(count) + first)
        elif len(str(expected.start)) == width:
            continue
        missing = next((number for number in expected if number not in numbers), None)
        if missing is not None:
            number_missing = expected.stop - expected.start - len(numbers)  # len() ends at 2^63
            name = printable(f"{before}{missing:0{width}}{after}")
            raise DataError(
                f"{paths[0].parent}: {name} is missing (missing in all: {number_missing:,}); download it again, or "
                "give the shards other names if the set is complete without it"
            )
