"""Rows of a GPU session's tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Rows = Iterator[dict[str, Any]]


def row(what: str, quantity: str, measured: object, forecast: object = None) -> dict[str, Any]:
    """Return a row of the page's tables."""
    return {"what": what, "quantity": quantity, "expected": forecast, "measured": measured}
