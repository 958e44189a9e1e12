"""Random changes of an input: of bytes, and of the nodes of a JSON document."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

_TOKENS = [
    b"\0" * 4, b"\xff" * 4, b"\x0a\x23\xd7\xce", b"\xff\xff\xff\x1f", b"\t", b"\n", b"9" * 25, b"-1", b": ", b"- ",
    b"{", b"[", b"]", b"}", b"!!python/name:os.system ", b"&a ", b"*a", b"null", b"1e999", b"\n  ", b"'", b",", b'"',
    b"\r", b"nan", b"\xef\xbb\xbf", b"\x1b[2J", b"\xe2\x80\xae",
]  # fmt: skip
_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(10**25), 0.5, math.nan, math.inf, "", "0", "nan", "../a", "/", [], {},
    [[]], "x" * 300, [[[[[[]]]]]],
]  # fmt: skip
_TEXTS = ["\n", "\x1b[2J", "\u202e", "\ud800", "\0", "/", "..", ",", "\u00b2", "9" * 25]
_MOST_BYTES = 1 << 14


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change a few places of an input; of JSON, in half of all cases, so that it stays JSON."""
    if data[:1] in (b"{", b"[") and rng.getrandbits(1):
        changed = _mutate_json(data, rng)
        if changed is not None:
            return changed
    return _mutate_bytes(data, rng)


def _mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip bits, overwrite, cut, repeat, insert tokens that parsers treat specially."""
    content = bytearray(data)
    for _ in range(1 + rng.getrandbits(2)):
        # One random number for all: randrange() for each would take longer than most readers.
        bits = rng.getrandbits(64)
        place, kind, size, byte = (
            (bits >> 28) % (len(content) + 1),
            bits % 6,
            1 + (bits >> 4) % 63,
            bits >> 56,
        )
        if kind == 0 and content:
            content[place % len(content)] ^= 1 << byte % 8
        elif kind == 1:
            content[place : place + 4] = _TOKENS[byte % len(_TOKENS)]
        elif kind == 2:
            content[place:place] = _TOKENS[byte % len(_TOKENS)]
        elif kind == 3:
            del content[place : place + size]
        elif kind == 4:
            content[place:place] = content[place : place + size]
        else:
            content[place : place + 1] = bytes([byte])
    return bytes(content)


def _mutate_json(data: bytes, rng: random.Random) -> bytes | None:
    """Change one line of JSON at one or two nodes; None if the line is no JSON, or grows too long."""
    lines = data.split(b"\n")
    number = int(rng.random() * len(lines))
    try:
        document = json.loads(lines[number])
        for _ in range(1 + rng.getrandbits(1)):
            nodes = list(_nodes(document))
            if nodes:
                _change_node(*rng.choice(nodes), rng.choice(nodes), rng)
        lines[number] = json.dumps(document).encode()
    except (ValueError, RecursionError):
        return None
    return b"\n".join(lines) if len(lines[number]) < _MOST_BYTES else None


def _nodes(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key, or the index, of each value of a document."""
    keys = (
        document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    )
    for key in keys:
        yield document, key
        yield from _nodes(document[key])


def _change_node(container: Any, key: Any, other: tuple[Any, Any], rng: random.Random) -> None:
    value, kind = container[key], rng.getrandbits(3)
    if kind == 0:
        del container[key]
    elif kind == 1:
        container[key] = copy.deepcopy(other[0][other[1]])
    elif kind == 2:
        container[key] = [value, value]
    elif kind == 3 and isinstance(container, dict):
        container[rng.choice(_TEXTS)] = value
    elif kind < 6 and isinstance(value, str):
        place = int(rng.random() * (len(value) + 1))
        container[key] = value[:place] + rng.choice(_TEXTS) + value[place + rng.getrandbits(2) :]
    else:
        container[key] = copy.deepcopy(rng.choice(_VALUES))
