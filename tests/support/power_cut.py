"""Power cuts: every state of a folder that a disk may hold after a cut between two system calls.

`record_calls.c` records the calls of a process that change a folder. `cuts` replays them on a model of a disk that
keeps only what was synced: the content of a file after its fsync, the names in a folder after the fsync of the folder.
What was not synced may have reached the disk or not, separately for each folder, and for the contents of all files.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

_HEAD = struct.Struct("<cQqII")
Tree = dict[str, bytes | None]
"""Relative path -> content of the file, or None for a folder."""


def build_recorder(folder: Path) -> Path | None:
    """Compile the recorder; return the library to preload, or None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "record_calls.so"
    source = Path(__file__).with_name("record_calls.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


@dataclass
class _File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)

    @property
    def is_dirty(self) -> bool:
        return self.names != self.synced


@dataclass(frozen=True)
class Call:
    """A recorded call."""

    op: str
    """C create a file, W write, T truncate, S sync a file, D sync a folder, M mkdir, R rename, L link, U remove."""
    inode: int
    offset: int
    path: str
    data: bytes


def read_calls(recorded: Path) -> list[Call]:
    """Return the calls of a recording."""
    content, calls, position = recorded.read_bytes(), [], 0
    while position < len(content):
        op, inode, offset, length, size = _HEAD.unpack_from(content, position)
        position += _HEAD.size
        path, data = (
            content[position : position + length],
            content[position + length : position + length + size],
        )
        calls.append(Call(op.decode(), inode, offset, path.decode(), data))
        position += length + size
    return calls


class Disk:
    """Model of a disk with one folder, which is empty and synced at first."""

    def __init__(self, root: Path) -> None:
        """Take the path of the folder in the recording."""
        self._prefix, self.root = str(root), _Folder()
        self._files: dict[int, _File] = {}

    def apply(self, call: Call) -> None:
        """Change the state as a call does."""
        if call.op == "W":
            data = self._files[call.inode].data
            data.extend(bytes(max(call.offset + len(call.data) - len(data), 0)))
            data[call.offset : call.offset + len(call.data)] = call.data
        elif call.op == "T":
            data = self._files[call.inode].data
            data.extend(bytes(max(call.offset - len(data), 0)))
            del data[call.offset :]
        elif call.op == "S":
            self._files[call.inode].synced = bytes(self._files[call.inode].data)
        elif call.op == "D":
            folder = self._find(call.path)
            folder.synced = dict(folder.names)
        else:
            parent, name = self._parent(call.path)
            if call.op == "C":
                parent.names[name] = self._files[call.inode] = _File()
            elif call.op == "M":
                parent.names[name] = _Folder()
            elif call.op == "U":
                del parent.names[name]
            else:
                target, new_name = self._parent(call.data.decode())
                target.names[new_name] = parent.names[name]
                if call.op == "R":
                    del parent.names[name]

    def states(self, *, each_folder: bool) -> Iterator[Tree]:
        """Yield what the disk may hold if the power is cut now.

        The unsynced names of all folders have reached the disk, or of none; with `each_folder` also those of one folder
        alone, and of all but one.
        """
        dirty = [path for path, folder in self._folders(self.root, "") if folder.is_dirty]
        counts = {0, len(dirty)} | ({1, len(dirty) - 1} if each_folder and dirty else set())
        for count in sorted(counts):
            for written in combinations(dirty, count):
                for with_data in (False, True):
                    yield self._tree(self.root, "", set(written), with_data)

    def _tree(self, folder: _Folder, path: str, written: set[str], with_data: bool) -> Tree:
        tree: Tree = {}
        for name, entry in (folder.names if path in written else folder.synced).items():
            inner = f"{path}/{name}" if path else name
            if isinstance(entry, _Folder):
                tree |= {inner: None} | self._tree(entry, inner, written, with_data)
            else:
                tree[inner] = bytes(entry.data) if with_data else entry.synced
        return tree

    def _folders(self, folder: _Folder, path: str) -> Iterator[tuple[str, _Folder]]:
        yield path, folder
        # A folder may have one name on the disk and another one in memory.
        for names in (folder.names, folder.synced):
            for name, entry in names.items():
                if isinstance(entry, _Folder):
                    yield from self._folders(entry, f"{path}/{name}" if path else name)

    def _find(self, path: str) -> _Folder:
        found = self.root
        for name in path.removeprefix(self._prefix).split("/"):
            if name:
                entry = found.names[name]
                assert isinstance(entry, _Folder)
                found = entry
        return found

    def _parent(self, path: str) -> tuple[_Folder, str]:
        parent, _, name = path.rpartition("/")
        return self._find(parent), name


def write_tree(tree: Tree, folder: Path) -> None:
    """Write a state of the disk into a new folder."""
    folder.mkdir()
    for name, content in tree.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
