"""The numbers of an evaluation as people read them, on a terminal and on a page."""

from __future__ import annotations

COUNTS = {"pairs", "genuine", "impostors", "probes", "mated", "searches", "distractors", "noises"}
"""Numbers that say how large a set is."""
_PLAIN = {"threshold", "xnorm", "auc"}
"""Numbers that are no shares, or are too near 1 to be read as per cent."""


def number_text(name: str, value: float | None) -> str:
    """Return a number as a reader wants it: shares in per cent, the rest as it is."""
    if value is None:
        return "–"
    return f"{value:.5f}" if name in _PLAIN else f"{value:.3%}"


def interval_text(name: str, interval: tuple[float, float] | None) -> str:
    """Return an interval as a reader wants it."""
    return f"[{number_text(name, interval[0])}, {number_text(name, interval[1])}]" if interval else ""
