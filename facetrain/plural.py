"""Numbers with their noun, for messages."""

from __future__ import annotations


def count_text(number: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun: "1 rank", "2 ranks"."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def images_text(images: int, identities: int) -> str:
    """Return the size of a dataset: "1,200 images of 60 identities"."""
    return f"{count_text(images, 'image')} of {count_text(identities, 'identity', 'identities')}"
