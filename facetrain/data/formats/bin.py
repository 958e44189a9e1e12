"""NAME.bin, the verification sets that everyone uses: a pickle, read without unpickling.

The file is a pickle of (list of encoded images, list of same or different). Python's unpickler
runs what a file tells it to run; this one is a small interpreter of the pickle language that knows
bytes, numbers, strings, lists, tuples, and byte arrays of NumPy, and can build nothing else.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from facetrain.errors import PairsError


@dataclass(frozen=True)
class _Name:
    """A global that a pickle names. It is only ever compared with names that we know."""

    module: str
    name: str


@dataclass
class _Array:
    """A NumPy array on its way: what `_reconstruct` made, until its state gives it bytes."""

    data: bytes | None = None


_MARK = object()
_RECONSTRUCT = {_Name(m, "_reconstruct") for m in ("numpy.core.multiarray", "numpy._core.multiarray")}
_SCALAR = {_Name(m, "scalar") for m in ("numpy.core.multiarray", "numpy._core.multiarray")}
_FROMBUFFER = {_Name(m, "_frombuffer") for m in ("numpy.core.numeric", "numpy._core.numeric")}
_DTYPE = _Name("numpy", "dtype")
_ENCODE = _Name("_codecs", "encode")
_BYTES = {_Name("builtins", "bytes"), _Name("__builtin__", "bytes"), _Name("__builtin__", "bytearray")} | {
    _Name("builtins", "bytearray")
}
_BYTE_DTYPES = {"u1", "|u1", "b1", "|b1", "i1", "|i1", "bool", "uint8"}


def read_bin(path: Path) -> tuple[list[bytes], np.ndarray]:
    """Return the encoded images, two per pair, and whether each pair is of one person: bool (pairs,).

    Raises:
        PairsError: the file is not such a set; nothing that it holds is run.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PairsError(f"{path}: {error.strerror or error}") from error
    try:
        value = _interpret(data)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, AttributeError) as error:
        raise PairsError(
            f"{path}: not a verification set ({' '.join(str(error).split()) or type(error).__name__})"
        ) from None
    return _checked(value, path)


def write_bin(path: Path, images: Iterable[bytes], same: Sequence[bool]) -> None:
    """Write a set that InsightFace's own code reads; it appears whole or not at all.

    Images are written as they come, and not held.

    Raises:
        PairsError: not two images per pair, or the file cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            count = _write_pickle(file, images, same)
            if count != 2 * len(same):
                raise PairsError(f"{path}: {count} images are not two for each of {len(same)} pairs")
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        raise PairsError(f"{path}: {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def _write_pickle(file: BinaryIO, images: Iterable[bytes], same: Sequence[bool]) -> int:
    """Write ([image, …], [same, …]) instruction by instruction: pickle.dump wants the whole list at once."""
    count = 0
    file.write(pickle.PROTO + b"\x04" + pickle.EMPTY_LIST + pickle.MARK)
    for image in images:
        file.write(pickle.BINBYTES + struct.pack("<I", len(image)) + image)
        count += 1
    file.write(pickle.APPENDS + pickle.EMPTY_LIST + pickle.MARK)
    file.write(b"".join(pickle.NEWTRUE if flag else pickle.NEWFALSE for flag in same))
    file.write(pickle.APPENDS + pickle.TUPLE2 + pickle.STOP)
    return count


def _checked(value: Any, path: Path) -> tuple[list[bytes], np.ndarray]:
    if not (
        isinstance(value, tuple | list)
        and len(value) == 2
        and all(isinstance(v, list | tuple) for v in value)
    ):
        raise PairsError(f"{path}: not a verification set: it holds no (images, same or different)")
    images = [_image_bytes(item, path, number) for number, item in enumerate(value[0])]
    flags = list(value[1])
    if not all(isinstance(flag, bool | int) and flag in (0, 1) for flag in flags):
        raise PairsError(f"{path}: the second list holds something else than same or different")
    if not flags or len(images) != 2 * len(flags):
        raise PairsError(f"{path}: {len(images):,} images are not two for each of {len(flags):,} pairs")
    return images, np.array(flags, dtype=bool)


def _image_bytes(item: Any, path: Path, number: int) -> bytes:
    if isinstance(item, _Array):
        item = item.data
    if isinstance(item, str):  # Python 2's str, when the file was written there
        try:
            item = item.encode("latin1")
        except UnicodeEncodeError:
            item = None
    if not isinstance(item, bytes | bytearray):
        raise PairsError(f"{path}: image {number} is not a string of bytes")
    return bytes(item)


def _interpret(data: bytes) -> Any:
    """Run the pickle's instructions on a stack of our own.

    pickletools checks every length against the file before it reads, so that no instruction can ask
    for more memory than the file has bytes.
    """
    machine = _Machine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of pickletools, for a text with a wrong escape
        for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.run(opcode.name, argument)
    raise ValueError("it ends too early")


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        if name in _PUSHED:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            made = _CONSTANTS[name]
            self.stack.append(made() if callable(made) else made)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[int(argument)] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[int(argument)])
        elif name not in ("PROTO", "FRAME"):
            handler = getattr(self, "_" + name.lower(), None)
            if handler is None:
                raise ValueError(f"instruction {name} has no place in it")
            handler(argument)

    def _since_mark(self) -> list[Any]:
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is _MARK:
                items = self.stack[place + 1 :]
                del self.stack[place:]
                return items
        raise ValueError("a list has no beginning")

    def _mark(self, _: Any) -> None:
        self.stack.append(_MARK)

    def _append(self, _: Any) -> None:
        item = self.stack.pop()
        _as_list(self.stack[-1]).append(item)

    def _appends(self, _: Any) -> None:
        items = self._since_mark()
        _as_list(self.stack[-1]).extend(items)

    def _list(self, _: Any) -> None:
        self.stack.append(self._since_mark())

    def _tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._since_mark()))

    def _tuple1(self, _: Any) -> None:
        self.stack.append((self.stack.pop(),))

    def _tuple2(self, _: Any) -> None:
        second, first = self.stack.pop(), self.stack.pop()
        self.stack.append((first, second))

    def _tuple3(self, _: Any) -> None:
        third, second, first = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append((first, second, third))

    def _pop(self, _: Any) -> None:
        self.stack.pop()

    def _pop_mark(self, _: Any) -> None:
        self._since_mark()

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.stack.append(_known(module, name))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(_known(module, name))

    def _reduce(self, _: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(_build(function, arguments))

    def _build(self, _: Any) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, _Array) and isinstance(state, tuple) and len(state) == 5:
            kind, raw = state[2], state[4]
            if kind not in _BYTE_DTYPES:
                raise ValueError(f"an array of {kind!r} is no image")
            made.data = raw.encode("latin1") if isinstance(raw, str) else bytes(_as_bytes(raw))
        elif not (isinstance(made, str) and made in _BYTE_DTYPES):
            raise ValueError("it builds something that is no image")


def _as_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("it adds to something that is no list")
    return value


def _as_bytes(value: Any) -> bytes | bytearray:
    # Never bytes(7): that would be as much memory as a file cares to ask for.
    if not isinstance(value, bytes | bytearray):
        raise ValueError("something else stands where bytes should")
    return value


def _known(module: Any, name: Any) -> _Name:
    found = _Name(module, name)
    if found in _RECONSTRUCT | _SCALAR | _FROMBUFFER | _BYTES | {_DTYPE, _ENCODE, _Name("numpy", "ndarray")}:
        return found
    raise ValueError(
        f"it asks for {module}.{name}, which a list of images does not need; it may be an attack"
    )


def _build(function: Any, arguments: Any) -> Any:
    if not isinstance(function, _Name) or not isinstance(arguments, tuple):
        raise ValueError("it calls something that is no function")
    if function in _RECONSTRUCT:
        return _Array()
    if function == _DTYPE and isinstance(arguments[0], str) and arguments[0] in _BYTE_DTYPES:
        return arguments[0]
    if function in _FROMBUFFER and arguments[1] in _BYTE_DTYPES:
        return _Array(bytes(_as_bytes(arguments[0])))
    if function in _SCALAR and arguments[0] in _BYTE_DTYPES:
        raw = arguments[1].encode("latin1") if isinstance(arguments[1], str) else _as_bytes(arguments[1])
        return raw[0]
    if function == _ENCODE and isinstance(arguments[0], str) and arguments[1] == "latin1":
        return arguments[0].encode("latin1")
    if function in _BYTES and not arguments:
        return b""
    if function in _BYTES:
        return bytes(_as_bytes(arguments[0]))
    raise ValueError(f"it calls {function.module}.{function.name} in a way that no image needs")


_PUSHED = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "FLOAT", "BINFLOAT",
}  # fmt: skip
_CONSTANTS: dict[str, Any] = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
