"""Damages of a run folder: each changes one file or folder of a copy, chosen by its role."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import yaml

from facetrain.checkpoint import manifest as manifests
from facetrain.checkpoint.commit import complete_steps, step_folder
from facetrain.files import sha256_of

CRAFTED = ("edit", "foreign", "rename", "re-sign")
"""Damages whose checkpoints are complete: checksums cannot tell them from saved ones."""
_KINDS = [
    "truncate", "flip", "flip", "append", "junk", "zeros", "delete", "swap", "link", "loop", "folder", "pipe",
    "edit", "edit", "edit", "edit", "foreign", "rename", "re-sign", "re-sign", "delete folder", "link folder",
    "file for folder",
]  # fmt: skip
_JUNK = [
    b"\0" * 64,
    b"\xff" * 64,
    b"[" * 5000,
    b'{"a":' * 5000,
    b"NaN\n",
    b"&a [*a, *a]\n",
    b"!!python/name:os.system\n",
]


class Damager:
    """Damages copies of a run."""

    def __init__(self, foreign: Path, bystander: Path, rng: random.Random) -> None:
        """Prepare to damage; `foreign` is another run, and `bystander` a file outside of all runs."""
        self._other, self._bystander, self._rng = foreign, bystander, rng

    def damage(self, run: Path) -> tuple[str, str]:
        """Apply one damage; return its kind and the role of its target."""
        rng, self._files = self._rng, sorted(path for path in run.rglob("*") if path.is_file())
        checkpoints = run / "checkpoints"
        folders = [checkpoints, *(step_folder(checkpoints, step) for step in complete_steps(checkpoints))]
        # By role: the many lines of the log would otherwise be damaged rarely, and the shards most of the time.
        roles: dict[str, list[Path]] = {}
        for path in self._files:
            roles.setdefault(_role(path), []).append(path)
        documents = [name for name in roles if name.endswith((".json", ".jsonl", ".yaml", ".lock", "latest"))]
        targets = dict.fromkeys(_KINDS, roles[rng.choice(sorted(roles))])
        targets |= dict.fromkeys(("delete folder", "link folder", "file for folder"), folders)
        targets |= dict.fromkeys(("foreign", "rename"), folders[-1:])
        targets |= {"edit": roles[rng.choice(sorted(documents))]}
        targets |= {"re-sign": sorted(folders[-1].glob("*.safetensors"))}
        kind = rng.choice(_KINDS)
        target = rng.choice(targets[kind])
        role = _role(target)
        getattr(self, "_" + kind.replace(" ", "_").replace("-", "_"))(target)
        return kind, role

    def _truncate(self, path: Path) -> None:
        os.truncate(path, self._rng.randrange(path.stat().st_size + 1))

    def _flip(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        for _ in range(self._rng.choice([1, 1, 8]) if data else 0):
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        path.write_bytes(data)

    def _append(self, path: Path) -> None:
        with path.open("ab") as file:
            file.write(self._rng.choice([*_JUNK, self._rng.randbytes(100), path.read_bytes()]))

    def _junk(self, path: Path) -> None:
        path.write_bytes(self._rng.choice([b"", *_JUNK, self._rng.randbytes(1000)]))

    def _zeros(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        start = self._rng.randrange(len(data) + 1)
        data[start : start + 512] = bytes(len(data[start : start + 512]))
        path.write_bytes(data)

    def _delete(self, path: Path) -> None:
        path.unlink()

    def _swap(self, path: Path) -> None:
        other = self._rng.choice(self._files)
        mine, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(mine)

    def _link(self, path: Path) -> None:
        path.unlink()
        # The bystander: a readable file outside the run, which no reader and no resumed run may change.
        outside = str(self._bystander)
        names = [outside, outside, "/dev/zero", "nowhere", str(self._other), "..", self._files[0].name]
        path.symlink_to(self._rng.choice(names))

    def _loop(self, path: Path) -> None:
        path.unlink()
        path.symlink_to(path.name)

    def _folder(self, path: Path) -> None:
        path.unlink()
        path.mkdir()

    def _pipe(self, path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    def _foreign(self, path: Path) -> None:
        steps = complete_steps(self._other / "checkpoints")
        source = step_folder(self._other / "checkpoints", self._rng.choice(steps))
        target = path.parent / source.name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)

    def _rename(self, path: Path) -> None:
        path.rename(step_folder(path.parent, self._rng.choice([1, 17, 23, 10**12])))

    def _delete_folder(self, path: Path) -> None:
        shutil.rmtree(path)

    def _link_folder(self, path: Path) -> None:
        shutil.rmtree(path)
        path.symlink_to(self._rng.choice([path.name, ".", "/", str(self._other)]))

    def _file_for_folder(self, path: Path) -> None:
        shutil.rmtree(path)
        path.write_bytes(b"file")

    def _edit(self, path: Path) -> None:
        """Change a value, as another version or a person would; a manifest gets the right checksum again."""
        rng, text = self._rng, path.read_text(errors="replace")
        if path.name == manifests.MANIFEST:
            body = json.loads(text)
            body["format"] = rng.choice([body["format"], body["format"], 0, 2, 99, "1", None])
            inner = {key: value for key, value in body.items() if key not in ("format", "sha256")}
            self._change(inner)
            _write_manifest(path, {"format": body["format"]} | inner)
        elif path.name == "latest":
            names = ["step_00000004", "step_99999999", "../../x", "/etc/passwd", "", "step_00000004\n\n"]
            path.write_text(rng.choice(names))
        elif path.suffix == ".yaml":
            body = yaml.safe_load(text)
            self._change(body)
            path.write_text(yaml.safe_dump(body))
        else:
            lines = text.splitlines() if path.suffix == ".jsonl" else [text]
            number = rng.randrange(len(lines))
            body = json.loads(lines[number])
            self._change(body)
            lines[number] = rng.choice([json.dumps(body), json.dumps(body), "", "[]", "null", "[" * 2000])
            path.write_text("\n".join(lines) + "\n")

    def _change(self, body: dict[str, Any]) -> None:
        """Change, add or remove a value of a nested dict."""
        rng, place = self._rng, body
        while rng.random() < 0.8:
            inner = [value for _, value in sorted(place.items()) if isinstance(value, dict) and value]
            if not inner:
                break
            place = rng.choice(inner)
        key = rng.choice([*sorted(place), "added"])
        if rng.random() < 0.2:
            place.pop(key, None)
        else:
            place[key] = rng.choice([
                None, -1, 0, 1, 7, 0.5, 2**31, 2**63, 1e308, -1e308, float("nan"), float("inf"), "", "x", "../x",
                "\x1b[2J", [], {}, True, False, [1, 2], [[]] * 50, {"a": {"b": 1}},
            ])  # fmt: skip

    def _re_sign(self, path: Path) -> None:
        """Change a shard, and the checksums of its manifest too, as a faulty program that writes checkpoints would."""
        rng, data = self._rng, bytearray(path.read_bytes())
        (length,) = struct.unpack_from("<Q", data)
        if rng.random() < 0.7:
            header = json.loads(data[8 : 8 + length])
            tensor = header[rng.choice(sorted(header.keys() - {"__metadata__"}))]
            kind = rng.randrange(5)
            if kind == 0:
                tensor["dtype"] = rng.choice(["F16", "I32", "F64", "U8", "BOOL", "F8_E4M3", "X"])
            elif kind == 1:
                tensor["shape"] = rng.choice(
                    [[], [0], [1 << 62], [*tensor["shape"], 1], tensor["shape"][::-1]]
                )
            elif kind == 2:
                tensor["data_offsets"] = rng.choice([[0, 0], [0, 4], [4, 0], [0, 1 << 62]])
            elif kind == 3:
                names = sorted(header.keys() - {"__metadata__"})
                header[rng.choice([*names, "x", "../x"])] = header.pop(rng.choice(names))
            else:
                self._change(header)
            written = json.dumps(header).encode()
            data[: 8 + length] = struct.pack("<Q", len(written)) + written
        elif rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        manifest = path.parent / manifests.MANIFEST
        body = json.loads(manifest.read_text())
        for entry in body["files"]:
            if entry["name"] == path.name:
                entry |= {"size": len(data), "sha256": sha256_of(path)}
        _write_manifest(manifest, body)


def _write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with its right checksum."""
    body = {key: value for key, value in manifest.items() if key not in ("format", "sha256")}
    path.write_text(json.dumps({"format": manifest["format"], "sha256": manifests.checksum(body)} | body))


def _role(path: Path) -> str:
    """Return the name of a file or folder without its numbers."""
    return "".join(c for c in path.name if not c.isdigit())
