"""A reader of one or several files of any bytes, to be fuzzed."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import zip_longest
from pathlib import Path
from unittest.mock import patch

from facetrain.data import column_cache
from tests.fuzz.framing import SEPARATOR
from tests.fuzz.outcome import outcome

# In memory where the system has such a folder: the disk would be most of the time.
_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
FOLDER = Path(tempfile.mkdtemp(prefix="facetrain-fuzz-", dir=_MEMORY))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


@contextmanager
def own_cache_folder() -> Iterator[None]:
    """Let datasets keep their catalogs in a folder of the fuzzer, whose paths are found once."""
    # To find them takes a third of an execution.
    find = column_cache._cache_paths
    found = lru_cache(lambda name: tuple(find(name)))
    folder = {"XDG_CACHE_HOME": str(FOLDER / "cache")}
    with patch.dict(os.environ, folder), patch.object(column_cache, "_cache_paths", found):
        yield


@dataclass(frozen=True)
class Target:
    """Reader, its documented error, and the files that it reads."""

    documented: type[Exception] | tuple[()]
    files: Sequence[str]
    """Files below `FOLDER`, which get the parts of the input."""
    read: Callable[[Path], object]
    """Reads the first file, or the folder `opened`. A text that it returns is part of the outcome."""
    seeds: Callable[[], Sequence[bytes]]
    """Writes valid inputs, to be mutated."""
    frame: Callable[[bytes], bytes] = bytes
    """Gives an input its right checksums."""
    separator: bytes = SEPARATOR
    opened: str = ""

    def __call__(self, data: bytes) -> str:
        """Read an input; return its outcome."""
        data = self.frame(data)
        parts = data.split(self.separator, len(self.files) - 1) if len(self.files) > 1 else [data]
        for file, part in zip_longest(self.files, parts, fillvalue=b""):
            write_input(f"{FOLDER}/{file}", part)
        return outcome(self.documented, partial(self.read, FOLDER / (self.opened or self.files[0])))


def write_input(path: str, data: bytes) -> None:
    """Write a file; without pathlib and buffers, which take longer than many readers."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(file, data)
    os.close(file)


def remove_catalogs(folder: Path) -> None:
    """Remove the catalogs of a dataset: two inputs of one size can have one modification time."""
    for name in os.listdir(folder):
        if name.endswith(".catalog"):
            os.unlink(f"{folder}/{name}")
