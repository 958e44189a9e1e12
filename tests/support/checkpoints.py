"""Checkpoints that a test damages or crafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from facetrain.checkpoint import manifest as manifests
from facetrain.checkpoint.manifest import MANIFEST
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.files import sha256_of
from tests.support.snapshots import snapshot


def saved(folder: Path) -> Path:
    """Save a checkpoint of step 1; return its folder."""
    writer = CheckpointWriter(folder, asynchronous=False)
    writer.save(snapshot(1))
    writer.finish()
    return folder / "step_00000001"


def flip_a_bit(path: Path) -> None:
    """Change the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a checkpoint; its checksum is updated, as an attacker would do."""
    body = json.loads((folder / MANIFEST).read_text())
    body = {key: body[key] for key in body if key not in ("format", "sha256")}
    change(body)
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "sha256": manifests.checksum(body)} | body))


def edit(folder: Path, file: int = 0, **changes: object) -> None:
    """Change the entry of a file in the manifest, as `rewrite` does."""
    rewrite(folder, lambda body: body["files"][file].update(changes))


def update_manifest(folder: Path, path: Path) -> None:
    """Make the manifest agree with a changed file."""
    names = [entry["name"] for entry in json.loads((folder / MANIFEST).read_text())["files"]]
    data = path.read_bytes()
    edit(folder, names.index(path.name), size=len(data), sha256=sha256_of(path))
