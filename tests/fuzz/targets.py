"""What is fuzzed: each target takes any bytes, and may raise nothing but its documented error."""

from __future__ import annotations

import atexit
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from facetrain.data.bin import read_bin
from facetrain.data.decode import decode_rgb
from facetrain.data.index import _build
from facetrain.data.recordio import MAGIC, RecordHeader, RecordReader, RecordWriter, decode_record
from facetrain.errors import ImageError, PairsError, RecordError
from tests.support.datasets import picture, write_records

# In memory where the system has such a folder: the disk would be most of the time.
_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
_FOLDER = Path(tempfile.mkdtemp(prefix="facetrain-fuzz-", dir=_MEMORY))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
_MAGIC = struct.pack("<I", MAGIC)


def recordio(data: bytes) -> None:
    """Read a file of these bytes from end to end, and at the offsets that they themselves name."""
    path = _FOLDER / "a.rec"
    path.write_bytes(data)
    reader = RecordReader(path)
    try:
        for offset in struct.unpack_from("<3q", data.ljust(24, b"\0")):
            try:
                reader.read_at(offset % (2 * len(data) + 1) - 4)
            except RecordError:
                continue
        for _, payload in reader.scan():
            decode_record(payload, "x")
    except RecordError:
        pass
    finally:
        reader.close()


def catalogue(data: bytes) -> None:
    """Catalogue a dataset: what stands before the first empty line is the index."""
    index, _, records = data.partition(b"\n\n")
    (_FOLDER / "train.idx").write_bytes(index)
    (_FOLDER / "train.rec").write_bytes(records)
    try:
        _build(_FOLDER / "train.rec", _FOLDER / "train.idx")
    except RecordError:
        pass


def image(data: bytes) -> None:
    """Decode a picture."""
    try:
        decode_rgb(data, where="x")
    except ImageError:
        pass


def bin_set(data: bytes) -> None:
    """Read a verification set."""
    path = _FOLDER / "a.bin"
    path.write_bytes(data)
    try:
        read_bin(path)
    except PairsError:
        pass


def seeds() -> dict[str, list[bytes]]:
    """Return valid inputs of each target, to be mutated."""
    import pickle

    write_records(_FOLDER / "seed", [0, 0, 1], size=4)
    with RecordWriter(_FOLDER / "magic.rec") as writer:
        for key, payload in enumerate([_MAGIC * 3, b"abcd" + _MAGIC + b"ef", b""]):
            writer.write(key, RecordHeader(2, (1.0, 2.0), key), payload)
    records = [(_FOLDER / "seed" / "train.rec").read_bytes(), (_FOLDER / "magic.rec").read_bytes()]
    index = (_FOLDER / "seed" / "train.idx").read_bytes().strip()
    sets = [pickle.dumps(([picture(0, 4), picture(1, 4)], [True]), protocol=p) for p in (2, 3, 4, 5)]
    return {
        "recordio": records,
        "catalogue": [index + b"\n\n" + records[0]],
        "image": [
            picture(0, 8),
            b"\xff\xd8\xff\xe0\0\x10JFIF\0\x01\1\0\0\1\0\1\0\0\xff\xc0\0\x0b\x08\0\x08\0\x08\1\1",
        ],
        "bin_set": sets,
    }


TARGETS: dict[str, Callable[[bytes], None]] = {
    "recordio": recordio,
    "catalogue": catalogue,
    "image": image,
    "bin_set": bin_set,
}
