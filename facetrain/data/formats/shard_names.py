"""Names of shards: the split that they belong to, and their number, of which a missing one would lose its images."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from facetrain.data.skipped_files import SkippedFile
from facetrain.errors import DataError
from facetrain.text import listed, printable

_OF_COUNT = re.compile(r"(?P<before>.*?)(?P<number>\d{5,})(?P<after>-of-(?P<count>\d{5,}).*)", re.ASCII)
"""train-00000-of-00003.parquet: the name has the number of shards."""
_FINGERPRINT = re.compile(r"(-of-\d{5,})-[0-9a-f]{16}(?=\.)", re.ASCII)
"""train-00000-of-00003-2f8f6bfa852eac4b.parquet: until 2023, Hugging Face's `datasets` gave each shard its own."""
_PADDED = re.compile(r"(?P<before>.*?)(?P<number>\d{3,})(?P<after>(?P<count>)\D*)", re.ASCII)
"""shard-000000.tar: numbers of equal width, of which one begins with a zero; others may be dates or sizes."""
_SPLIT = re.compile(
    r".*(?<![^\W\d_])(train(?:ing|set|val)?|test(?:s|ing|set)?|val(?:set|id(?:ate|ation)?)?|dev|eval(?:uation)?)"
    r"(?![^\W\d_]).*",
    re.IGNORECASE,
)
"""train.parquet, faces_val-000000.tar, my train (1).parquet: the last word of a split counts, with no letter beside."""


def split_of(name: str) -> str:
    """Return the word of the split in the name of a file or folder, in lower case; empty without one."""
    match = _SPLIT.fullmatch(name)
    return match[1].lower() if match else ""


def training_shards(paths: list[Path]) -> tuple[list[Path], list[SkippedFile]]:
    """Return the shards of a folder to train on, and those that are left out: other splits, if there are several.

    A file without the name of a split, such as part1-00000-of-00001.parquet, is trained on.

    Raises:
        DataError: no split of several is the one to train on, or the number of a shard is missing.
    """
    split = {path: word for path in paths if (word := split_of(path.name))}
    splits = set(split.values())
    others = {path for path, word in split.items() if len(splits) > 1 and not word.startswith("train")}
    if others and len(others) == len(split):
        raise DataError(
            f"{paths[0].parent}: has the splits {listed(sorted(splits))}, and none of them is 'train'; give a folder "
            "with one split"
        )
    shards = [path for path in paths if path not in others]
    _require_all(shards)
    return shards, [
        SkippedFile(path.name, "split", "not a file of the split 'train'") for path in paths if path in others
    ]


def _require_all(paths: Sequence[Path]) -> None:
    """Check that no number is missing in the names of shards.

    Raises:
        DataError: a shard is missing; the message names it.
    """
    series: dict[tuple[str, int, str, str], Counter[int]] = {}
    for path in paths:
        name = _FINGERPRINT.sub(r"\1", path.name)
        if match := _OF_COUNT.fullmatch(name) or _PADDED.fullmatch(name):
            key = match["before"], len(match["number"]), match["after"], match["count"]
            series.setdefault(key, Counter())[int(match["number"])] += 1
    for (before, width, after, count), numbers in series.items():
        expected = range(min(numbers), max(numbers) + 1)
        if count:
            first = int(int(count) in numbers)  # some programs count from 1
            expected = range(first, int(count) + first)
        elif len(str(expected.start)) == width:
            continue
        # Several, if the files of several uploads differ only in their fingerprints.
        copies = max(numbers.values())
        missing = next((number for number in expected if numbers[number] < copies), None)
        if missing is not None:
            number_missing = copies * (expected.stop - expected.start) - numbers.total()  # len() ends at 2^63
            name = printable(f"{before}{missing:0{width}}{after}")
            raise DataError(
                f"{paths[0].parent}: {name} is missing (missing in all: {number_missing:,}); download it again, or "
                "give the shards other names if the set is complete without it"
            )
