"""Dataset cards: name, origin, license and consent of a dataset, in a YAML file beside it.

FOLDER/dataset_card.yaml, or FILE.card.yaml for a dataset that is one file. FOLDER/train.rec has the card of its folder;
without one, train.rec.card.yaml is read:

    name: HSFace10k
    origin: https://github.com/HaiyuWu/Vec2Face
    license: non-commercial research
    consent: synthetic faces
    kind: synthetic          # or real, or unknown
    people: 10000
    images: 500000
    digest: sha256:…         # of the images and labels, in order; written by the tools that write datasets

A dataset that was merged has a list of such cards, one for each of its sources.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from facetrain.data.mixture import MIXTURE_SUFFIXES
from facetrain.errors import DataError
from facetrain.files import error_reason, parse_yaml, printable, read_regular_text

CARD_FILE, CARD_SUFFIX = "dataset_card.yaml", ".card.yaml"
UNKNOWN = "unknown"
KINDS = ("synthetic", "real", UNKNOWN)
_MAX_CHARACTERS = 1 << 16


@dataclass(frozen=True)
class DatasetCard:
    """Origin and terms of a dataset."""

    name: str
    origin: str = UNKNOWN
    """Address or description of the source."""
    license: str = UNKNOWN
    """Name of the license, or the terms in a few words."""
    consent: str = UNKNOWN
    """Consent of the people, in a few words."""
    kind: str = UNKNOWN
    """One of `KINDS`."""
    people: int | None = None
    images: int | None = None
    digest: str | None = None
    """sha256 of the images and their labels, in order; the same in every format."""


def card_path(dataset: Path) -> Path:
    """Return the path of a dataset's card; FOLDER/train.rec has the card of the folder."""
    if dataset.is_dir():
        return dataset / CARD_FILE
    if dataset.name == "train.rec":
        return dataset.parent / CARD_FILE
    return dataset.with_name(dataset.name + CARD_SUFFIX)


def read_card(dataset: Path) -> DatasetCard:
    """Return the card of a dataset, the first one of several.

    Raises:
        DataError: the card is not as described above.
    """
    return _read_cards_beside(dataset)[0]


def _read_cards_beside(dataset: Path) -> list[DatasetCard]:
    """Return the cards in the file of a dataset; without a file, a card with the name of the path."""
    path = card_path(dataset)
    if dataset.name == "train.rec" and not path.exists():
        path = dataset.with_name(dataset.name + CARD_SUFFIX)
    if not path.exists():
        return [DatasetCard(printable(dataset.name))]
    try:
        text = read_regular_text(path)
        content = parse_yaml(text) if len(text) <= _MAX_CHARACTERS else None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error_reason(error)}") from error
    if isinstance(content, list) and content:
        return [_card_of(entry, path) for entry in content]
    return [_card_of(content, path)]


def read_cards(dataset: Path) -> list[DatasetCard]:
    """Return the cards of a dataset, which are several if it was merged, or of all datasets of a mixture.

    Raises:
        DataError: a card or the mixture is damaged.
    """
    if dataset.suffix not in MIXTURE_SUFFIXES or not dataset.is_file():
        return _read_cards_beside(dataset)
    try:
        entries = parse_yaml(dataset.read_text(encoding="utf-8"))["datasets"]
        return [card for entry in entries for card in _read_cards_beside(dataset.parent / str(entry["path"]))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{dataset}: {error_reason(error)}") from error


def read_copied_cards(path: Path) -> list[dict[str, Any]]:
    """Return the cards in a file that `card_text` wrote; none if there is no such file, or it is damaged."""
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [card for card in (content if isinstance(content, list) else [content]) if isinstance(card, dict)]


def card_text(cards: Iterable[DatasetCard]) -> str:
    """Return cards as YAML: one as it is read, several as a list."""
    values = [card_values(card) for card in cards]
    return yaml.safe_dump(values[0] if len(values) == 1 else values, sort_keys=False, allow_unicode=True)


def card_values(card: DatasetCard) -> dict[str, Any]:
    """Return the stated values of a card by their keys."""
    return {key: value for key, value in dataclasses.asdict(card).items() if value is not None}


def write_card(dataset: Path, place: Path, card: DatasetCard) -> None:
    """Write the card of a dataset that is still at `place`, and will be at `dataset`."""
    _write_cards(dataset, place, [card])


def carry_cards(
    sources: Sequence[Path],
    dataset: Path,
    place: Path,
    size: tuple[int, int],
    digest: ImageDigest | None = None,
) -> None:
    """Write the cards of the datasets from which another one was written.

    Origin, license and consent are copied from the sources. A single source's card gets the new numbers. Of several
    sources, or a source with several cards, each card is listed, with the numbers of its own dataset.

    Args:
        sources: the datasets that were read.
        dataset: where the new one will be.
        place: where it is now.
        size: its numbers of people and images.
        digest: digest of its images and labels.

    Raises:
        DataError: a card is damaged.
    """
    cards = [card for source in sources for card in read_cards(source)]
    if len(cards) == 1:
        text = digest.text if digest else None
        cards = [dataclasses.replace(cards[0], people=size[0], images=size[1], digest=text)]
    _write_cards(dataset, place, list(dict.fromkeys(cards)))


def _write_cards(dataset: Path, place: Path, cards: list[DatasetCard]) -> None:
    path = place / CARD_FILE if place.is_dir() else dataset.with_name(dataset.name + CARD_SUFFIX)
    path.write_text(card_text(cards), encoding="utf-8")


class ImageDigest:
    """Digest of (label, image) pairs while they pass by."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def of(self, images: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Yield the pairs, and add them to the digest."""
        for label, data in images:
            self.add(label, data)
            yield label, data

    def add(self, label: int, data: bytes) -> None:
        """Add a pair."""
        # The size separates one image from the next.
        self._hash.update(f"{label} {len(data)}\n".encode())
        self._hash.update(data)

    @property
    def text(self) -> str:
        """The digest, with the name of the function."""
        return f"sha256:{self._hash.hexdigest()}"


def _card_of(content: Any, path: Path) -> DatasetCard:
    fields = {field.name: field for field in dataclasses.fields(DatasetCard)}
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        raise DataError(f"{path}: not a dataset card; it needs at least a `name:`")
    unknown = [str(key) for key in content if key not in fields]
    if unknown:
        raise DataError(f"{path}: unknown key {printable(unknown[0])}; allowed are {', '.join(fields)}")
    for key, value in content.items():
        wanted = int if key in ("people", "images") else str
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise DataError(
                f"{path}: {key} is {value!r:.60}; expected a {'whole number' if wanted is int else 'text'}"
            )
    if content.get("kind", UNKNOWN) not in KINDS:
        raise DataError(f"{path}: kind is {content['kind']!r:.60}; expected {', '.join(KINDS)}")
    values: dict[str, Any] = {
        key: printable(value) if isinstance(value, str) else value for key, value in content.items()
    }
    return DatasetCard(**values)
