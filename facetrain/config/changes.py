"""Values of a config by dotted keys, and the keys whose values differ between two configs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import reduce
from typing import Any

from pydantic import BaseModel


class ConfigChange(BaseModel, frozen=True):
    """Config key or section whose value differs from another config."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {json.dumps(self.before)} → {json.dumps(self.now)}"


def differences(before: dict[str, Any], now: dict[str, Any], section: str = "") -> Iterator[ConfigChange]:
    """Yield the keys whose values differ between two configs; a section that only one has is one change."""
    for name in dict.fromkeys([*now, *before]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{section}{name}.")
        elif old != new and json.dumps(old) != json.dumps(new):  # NaN is unequal to itself
            yield ConfigChange(key=f"{section}{name}", before=old, now=new)


def lookup(config: Any, key: str) -> Any:
    """Return the value of a dotted key; None if the key is absent or the values are not a nested mapping."""
    # The config in a checkpoint is untrusted input: it may have any shape.
    return reduce(
        lambda values, name: values.get(name) if isinstance(values, dict) else None, key.split("."), config
    )
