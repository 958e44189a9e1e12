"""Dataset cards: name, origin, license and consent of a dataset, in a YAML file beside it.

FOLDER/dataset_card.yaml, or FILE.card.yaml for a dataset that is one file. FOLDER/train.rec has the card of its folder:

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

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WrapValidator

from facetrain.data.beside_dataset import CARD_FILE, beside
from facetrain.data.mixture_file import MixtureFile, is_mixture
from facetrain.data.remote_dataset import DEFAULT_CACHE, ObjectCache
from facetrain.data.yaml_file import read_yaml
from facetrain.remote.catalog import CARD_SUFFIX
from facetrain.settings import Settings
from facetrain.strict_yaml import dump_yaml, parse_yaml
from facetrain.text import printable

UNKNOWN = "unknown"
_Text = Annotated[str, AfterValidator(printable)]
_Count = Annotated[int, Field(strict=True)]


class DatasetCard(Settings):
    """Origin and terms of a dataset."""

    name: _Text
    origin: _Text = UNKNOWN
    """Address or description of the source."""
    license: _Text = UNKNOWN
    """Name of the license, or the terms in a few words."""
    consent: _Text = UNKNOWN
    """Consent of the people, in a few words."""
    kind: Literal["synthetic", "real", "unknown"] = "unknown"
    people: _Count | None = None
    images: _Count | None = None
    digest: _Text | None = None
    """sha256 of the images and their labels, in order; the same in every format."""


def _one_or_several(content: Any, several: Callable[[Any], list[DatasetCard]]) -> list[DatasetCard]:
    # One is not put into a list: messages would count it.
    return several(content) if isinstance(content, list) else [DatasetCard.model_validate(content)]


_Cards = Annotated[list[DatasetCard], Field(min_length=1), WrapValidator(_one_or_several)]
"""Content of a card file: one card, or a list of them."""


def _read_cards_beside(dataset: Path) -> list[DatasetCard]:
    """Return the cards in the file of a dataset; without a file, a card with the name of the path."""
    path = beside(dataset, CARD_FILE, CARD_SUFFIX)
    cards: list[DatasetCard] = read_yaml(path, _Cards) if path.exists() else [DatasetCard(name=dataset.name)]
    return cards


def read_cards(dataset: Path, cache: ObjectCache = DEFAULT_CACHE) -> list[DatasetCard]:
    """Return the cards of a dataset, which are several if it was merged, or of all datasets of a mixture.

    Args:
        dataset: its path.
        cache: for datasets of a mixture in an object store.

    Raises:
        DataError: a card or the mixture is damaged.
    """
    if not is_mixture(dataset):
        return _read_cards_beside(dataset)
    content: MixtureFile = read_yaml(dataset, MixtureFile)
    return [card for entry in content.datasets for card in _read_cards_beside(entry.place(dataset, cache))]


def read_copied_cards(path: Path) -> list[dict[str, Any]]:
    """Return the cards in a file that `card_text` wrote; none if there is no such file, or it is damaged."""
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return united_cards(content if isinstance(content, list) else [content])


def united_cards(*lists: Any) -> list[dict[str, Any]]:
    """Return the cards in lists of metadata, in order and each once; what is no list or no card is left out."""
    cards = [card for one in lists if isinstance(one, list) for card in one if isinstance(card, dict)]
    return [card for number, card in enumerate(cards) if card not in cards[:number]]


def card_text(cards: Iterable[DatasetCard], *, before: Any = None) -> str:
    """Return the stated values of cards as YAML, after the list `before`: one as it is read, several as a list."""
    values = united_cards(before, [card.model_dump(exclude_none=True) for card in cards])
    return dump_yaml(values[0] if len(values) == 1 else values)


def carry_cards(
    cards: Sequence[DatasetCard], folder: Path, size: tuple[int, int], digest: ImageDigest | None
) -> None:
    """Write the cards of the datasets from which another one was written.

    Origin, license and consent stay. A single card gets the new numbers. Of several, each is listed, with the numbers
    of its own dataset.

    Args:
        cards: the cards of the datasets that were read.
        folder: the new one.
        size: its numbers of people and images.
        digest: digest of its images and labels.
    """
    if len(cards) == 1:
        text = digest.text if digest else None
        cards = [cards[0].model_copy(update={"people": size[0], "images": size[1], "digest": text})]
    write_cards(folder, list(dict.fromkeys(cards)))


def write_cards(folder: Path, cards: Sequence[DatasetCard]) -> None:
    """Write the cards of a dataset."""
    (folder / CARD_FILE).write_text(card_text(cards), encoding="utf-8")


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
