"""Names that no two images or identities of a written dataset share."""

from __future__ import annotations


def unique_name(
    stem: str, suffix: str, number: int | str, taken: set[str], *, ignore_case: bool = True
) -> str:
    """Return STEM + SUFFIX, or STEM_NUMBER + SUFFIX if that is taken, and add it to the names that are taken.

    If both are taken, a second number follows the first one.

    Args:
        stem: the name without its suffix.
        suffix: end of the name, which stays at its end; it may be empty.
        number: number of the image or identity.
        taken: names that were given before, in lower case if `ignore_case`.
        ignore_case: whether names that differ only in case are equal, as on some file systems.
    """
    name, copy = stem + suffix, 1
    while (known := name.lower() if ignore_case else name) in taken:
        name = f"{stem}_{number}{suffix}" if copy == 1 else f"{stem}_{number}_{copy}{suffix}"
        copy += 1
    taken.add(known)
    return name
