"""NAME.bin verification sets of InsightFace: a pickle of (encoded images, same-person flags); NAME.xz is one, packed.

A pickle can call any function, and the files are downloads. `read_bin` therefore runs Python's unpickler with
a `find_class` that returns the few constructors of byte arrays below, and nothing else. That does not bound the
memory: a pickle of nine bytes ("memoize the list at index 2^28") makes the unpickler allocate 4 GiB, and 20 MB of
one-byte instructions take half a minute and 1.4 GiB. So every instruction is checked first, against a list of allowed
ones and against the size of the file.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import pickle
import pickletools
import struct
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from facetrain.errors import PairsError
from facetrain.files import error_reason, new_file, open_regular, os_errors_as

_LOAD_ERRORS = (
    ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, AttributeError, EOFError,
    pickle.UnpicklingError,
)  # fmt: skip
"""Errors of pickletools, of the unpickler and of our constructors on damaged data."""
_ALLOWED_OPCODES = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK",
    "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET",
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4",
    "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD",
})  # fmt: skip
"""Instructions of pickles of lists, tuples, numbers, strings, bytes and arrays; no dicts, sets or objects."""
_DTYPES = frozenset(
    {"b1", "bool", "uint8", "O8", "object"}
    | {f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}
    | {"f4", "f8"}
)
"""Types of arrays: bytes of an image, labels of any integer or floating-point type, and Python objects."""
_LEAST_BYTES = 16
"""Bytes for each instruction: published sets have at least 213, images of 48 × 48 pixels in arrays 38."""
_SPARE_INSTRUCTIONS = 1 << 16
"""Instructions that a set of any size may have beyond those."""
_EXPECTED = (
    "expected a pickle of a pair of lists (encoded images, same person); write one with `facetrain data pairs`, or "
    "download it again"
)
_SPARE_BYTES = 1 << 21
"""Bytes that any .xz file may unpack to; an instruction of one byte can make an object of 70."""


def read_bin(path: Path) -> tuple[list[bytes], np.ndarray]:
    """Read a verification set.

    Returns:
        The encoded images, two per pair, and whether each pair shows one person: bool (pairs,).

    Raises:
        PairsError: if the file cannot be read or is not a verification set. No code of the file is run.
    """
    path = Path(path)
    with os_errors_as(PairsError, path), open(path, "rb", opener=open_regular) as file:
        data = file.read()
    if path.suffix.lower() == ".xz":
        data = _unpacked(data, path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # invalid escapes in text of old protocols
            _check_instructions(data)
            value = _ImageSetUnpickler(data).load()
            return _check_set(value, path)
    except _LOAD_ERRORS as error:
        raise PairsError(
            f"{path}: not a verification set ({error_reason(error, of_text=False)}); {_EXPECTED}"
        ) from None


def _unpacked(data: bytes, path: Path) -> bytes:
    """Return the content of an .xz file.

    Raises:
        PairsError: the file is damaged, or grows too much: encoded images hardly compress.
    """
    limit = 4 * len(data) + _SPARE_BYTES
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=1 << 30)
    try:
        unpacked = unpacker.decompress(data, limit)
    except lzma.LZMAError as error:
        raise PairsError(
            f"{path}: not an .xz file, or damaged ({error_reason(error)}); copy it again"
        ) from None
    if not unpacker.eof:
        raise PairsError(
            f"{path}: is cut off, or unpacks to more than the {limit:,} bytes of such a set; copy it again"
        )
    if unpacker.unused_data.strip(b"\0"):  # zeros are padding
        raise PairsError(f"{path}: something follows the set; were two files joined?")
    return unpacked


def write_bin(path: Path, images: Iterable[bytes], same: Sequence[bool]) -> None:
    """Write a verification set that InsightFace's code can read; the file appears complete or not at all.

    Images are written as the iterable yields them, and not kept in memory.

    Raises:
        PairsError: if there are not two images per pair, or the file cannot be written.
    """
    with new_file(path, PairsError) as scratch, scratch.open("wb") as file:
        count = _write_pickle(file, images, same)
        if count != 2 * len(same):
            raise PairsError(f"{path}: {count} images for {len(same)} pairs; expected two for each pair")
        file.flush()
        os.fsync(file.fileno())


def _write_pickle(file: BinaryIO, images: Iterable[bytes], same: Sequence[bool]) -> int:
    """Write ([image, …], [same, …]) and return the number of images.

    Written by instruction, because pickle.dump needs the whole list in memory.
    """
    count = 0
    file.write(pickle.PROTO + b"\x04" + pickle.EMPTY_LIST + pickle.MARK)
    for image in images:
        file.write(pickle.BINBYTES + struct.pack("<I", len(image)) + image)
        count += 1
    file.write(pickle.APPENDS + pickle.EMPTY_LIST + pickle.MARK)
    file.write(b"".join(pickle.NEWTRUE if flag else pickle.NEWFALSE for flag in same))
    file.write(pickle.APPENDS + pickle.TUPLE2 + pickle.STOP)
    return count


def _check_instructions(data: bytes) -> None:
    """Raise ValueError unless all instructions are allowed, need no more memory than the file's size, and are all.

    `pickletools` checks the length of every argument against the data. What remains is the index of a
    memo entry: the unpickler allocates an array up to this index.
    """
    end, most = 0, _SPARE_INSTRUCTIONS + len(data) // _LEAST_BYTES
    for count, (opcode, argument, place) in enumerate(pickletools.genops(_WithoutEscapes(data))):
        end = (place or 0) + 1
        if opcode.name not in _ALLOWED_OPCODES:
            raise ValueError(f"instruction {opcode.name} is not allowed")
        if count == most:
            raise ValueError(
                f"more than {most:,} instructions in {len(data):,} bytes, too many for encoded images"
            )
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
            raise ValueError(f"memo index {argument} after {count} instructions")
    if end < len(data):
        raise ValueError(f"{len(data) - end:,} bytes after its end: were two sets joined?")


class _WithoutEscapes(io.BytesIO):
    """A pickle as pickletools can read it, which takes the escapes in texts for ASCII: Python 2 wrote images so."""

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return the next line with its length. Of the texts only the length counts; numbers have no backslash."""
        return super().readline(size).replace(b"\\", b"/")


class _ImageSetUnpickler(pickle.Unpickler):
    """Unpickler that can construct byte arrays and nothing else, for data that `_check_instructions` passed."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")  # Python 2 wrote images as str
        # A file can repeat a call that copies its argument; a valid file copies each byte at most once.
        self._copyable_bytes = len(data)
        self._constructors: dict[tuple[str, str], Callable[..., Any]] = {
            ("_codecs", "encode"): self._bytes,
            ("numpy", "dtype"): _Dtype,
            ("numpy", "ndarray"): _no_call,
        }
        for package in ("numpy.core", "numpy._core"):  # before and since NumPy 2
            self._constructors[f"{package}.multiarray", "_reconstruct"] = self._reconstruct
            self._constructors[f"{package}.multiarray", "scalar"] = self._scalar
            self._constructors[f"{package}.numeric", "_frombuffer"] = self._frombuffer
        for package in ("builtins", "__builtin__"):  # Python 3 and Python 2
            self._constructors[package, "bytes"] = self._bytes
            self._constructors[package, "bytearray"] = self._bytes

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return our constructor for a name in the file, never the real function."""
        constructor = self._constructors.get((module, name))
        if constructor is None:
            raise ValueError(f"unexpected object {module}.{name}; the file may be malicious")
        return constructor

    def copy_bytes(self, value: Any) -> bytes:
        """Return bytes, a bytearray or a latin-1 string as bytes; the copies may not exceed the size of the file."""
        if isinstance(value, bytes):
            return value
        # Never bytes(value) of a number: that would allocate as many bytes as the file asks for.
        if not isinstance(value, bytearray | str):
            raise ValueError(f"it has a value of type {type(value).__name__} in place of bytes")
        self._copyable_bytes -= len(value)
        if self._copyable_bytes < 0:
            raise ValueError("its byte arrays are larger than the file")
        return value.encode("latin1") if isinstance(value, str) else bytes(value)

    def _bytes(self, value: Any = b"", encoding: Any = "latin1") -> bytes:
        if encoding not in ("latin1", "latin-1"):
            raise ValueError("unexpected encoding of bytes")
        return self.copy_bytes(value)

    def _reconstruct(self, *_: Any) -> _Array:
        return _Array(self)

    def _frombuffer(self, buffer: Any, dtype: Any, *_: Any) -> _Array:
        array = _Array(self)
        array.fill(dtype, buffer)
        return array

    def _scalar(self, dtype: Any, value: Any) -> int | float:
        array = _Array(self)
        array.fill(dtype, value)
        return array.values()[0]


class _Array:
    """Replacement of a NumPy array: created empty, then filled by its pickled state."""

    def __init__(self, unpickler: _ImageSetUnpickler) -> None:
        self._unpickler = unpickler
        self._type: np.dtype[Any] = np.dtype(np.uint8)
        self.data: Any = None
        """Bytes of the numbers, or the list of the objects."""

    def __setstate__(self, state: Any) -> None:
        _, _, dtype, _, data = state  # version, shape, dtype, is_fortran, data
        self.fill(dtype, data)

    def fill(self, dtype: Any, data: Any) -> None:
        """Store the content of the array."""
        self._type = (dtype if isinstance(dtype, _Dtype) else _Dtype(dtype)).type
        is_list = self._type.hasobject and isinstance(data, list)
        self.data = data if is_list else self._unpickler.copy_bytes(data)

    def image(self) -> bytes:
        """Return the content of an array of bytes."""
        if self._type.itemsize != 1 or not isinstance(self.data, bytes):
            raise ValueError(f"an encoded image is an array of bytes, not of {self._type}")
        return self.data

    def values(self) -> list[Any]:
        """Return the items of an array."""
        if isinstance(self.data, list):
            return self.data
        return np.frombuffer(self.data or b"", self._type).tolist()


class _Dtype:
    """Replacement of a NumPy dtype."""

    def __init__(self, name: Any, *_: Any) -> None:
        if not isinstance(name, str) or name.lstrip("|<>=") not in _DTYPES:
            raise ValueError("unexpected call of numpy.dtype: a set has arrays of bytes and of labels")
        self.type: np.dtype[Any] = np.dtype(object if name == "O8" else name)

    def __setstate__(self, state: Any) -> None:
        """Set the byte order, the second entry of the state; the others mean nothing for numbers."""
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">"):
            self.type = self.type.newbyteorder(state[1])


def _no_call(*_: Any) -> None:
    raise ValueError("unexpected call of numpy.ndarray")


def _check_set(value: Any, path: Path) -> tuple[list[bytes], np.ndarray]:
    try:
        images, flags = (part.values() if isinstance(part, _Array) else part for part in value)
        if not isinstance(images, list | tuple) or not isinstance(flags, list | tuple | bytes):
            raise TypeError
    except (TypeError, ValueError):
        raise PairsError(f"{path}: not a verification set; {_EXPECTED}") from None
    # By object: a file may refer to one image many times, and its bytes are then converted once.
    converted: dict[int, bytes] = {}
    for number, item in enumerate(images):
        if id(item) not in converted:
            converted[id(item)] = _image_bytes(item, path, number)
    if not all(isinstance(flag, int | float) and flag in (0, 1) for flag in flags):
        raise PairsError(f"{path}: the second list, the labels, has a value other than true and false")
    if not flags or len(images) != 2 * len(flags):
        raise PairsError(
            f"{path}: {len(images):,} images for {len(flags):,} pairs; expected two for each pair"
        )
    return [converted[id(item)] for item in images], np.array(list(flags), dtype=bool)


def _image_bytes(item: Any, path: Path, number: int) -> bytes:
    if isinstance(item, _Array):
        item = item.image()
    with contextlib.suppress(UnicodeEncodeError):
        if isinstance(item, str | bytes | bytearray):
            return item.encode("latin1") if isinstance(item, str) else bytes(item)
    raise PairsError(f"{path}: image {number} is not a byte string")
