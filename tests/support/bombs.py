"""Hostile files for every reader, and the time and memory that it takes: `python -m tests.support.bombs [NAME …]`.

Prints one JSON object per file: its name, its bytes, the seconds, the growth of resident memory in MiB, and the message of
the reader's error (empty if it read the file). Each file is read in a forked process.
"""

# ruff: noqa: E501 (the table has one line per file)
from __future__ import annotations

import json
import lzma
import os
import pickle
import struct
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import load_config
from facetrain.data.formats.bin import read_bin
from facetrain.data.images.decode import decode_rgb, encode_jpeg
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import FacetrainError
from facetrain.models.embedding_model import open_model
from facetrain.models.weight_files import read_weights
from facetrain.verify.score_files import read_scores
from tests.support.embeddings import load_rows
from tests.support.faults import memory_limited_to
from tests.support.memory import resident_peak

MAX_SECONDS, SPARE_MIB = 10.0, 256
_SAFETY = 6 << 30
_GIB = 1 << 30


def _jpeg(width: int, height: int) -> bytes:
    import numpy as np

    data = bytearray(encode_jpeg(np.zeros((16, 16, 3), np.uint8), 90))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def _png(width: int, height: int, *, bits: int = 8, kind: int = 2) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    channels = {0: 1, 2: 3, 6: 4}[kind]
    packer, rows = zlib.compressobj(9), []
    line = bytes(1 + width * channels * bits // 8)
    for _ in range(min(height, 9000)):
        rows.append(packer.compress(line))
    body = b"".join(rows) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _tar(
    folder: Path, name: str, body: bytes, *, kind: bytes = tarfile.REGTYPE, size: int | None = None
) -> Path:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(body) if size is None else size
    padded = body + bytes(-len(body) % 512)
    return _file(folder / "a.tar", info.tobuf(tarfile.GNU_FORMAT) + padded + bytes(1024)).parent


def write_equal_embeddings(path: Path, *, rows: int, size: int, name: str) -> Path:
    """Write a small Parquet file of `rows` embeddings with `size` numbers, which are all 1."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = pa.array(np.ones(rows * size, np.float32))
    columns = {
        "name": pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([name])), "label": pa.array([0] * rows),
        "embedding": pa.FixedSizeListArray.from_arrays(flat, size),
    }  # fmt: skip
    pq.write_table(pa.table(columns), path, compression="zstd", row_group_size=10**9, store_schema=False)
    return path


def _npz(path: Path, *, rows: int = 2, claimed: str = "") -> Path:
    """Write a file of embeddings of zeros, compressed; `claimed` replaces the header of the embeddings."""
    import numpy as np

    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in (("name", np.array(["a", "b"])), ("label", np.arange(2))):
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array)
        header = claimed or f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, 512)}}"
        start = np.lib.format.magic(2, 0) + struct.pack("<I", len(header)) + header.encode()
        with archive.open("embedding.npy", "w", force_zip64=True) as file:
            file.write(start)
            for _ in range(0 if claimed else rows * 2048 >> 20):
                file.write(bytes(1 << 20))
    return path


def write_constant_of_shape(path: Path, *, doublings: int = 0, size: int = 1 << 33, batch: int = 1) -> Path:
    """Write a graph that computes a huge value from constants: at once, or by doubling a small one."""
    from onnx import TensorProto, helper

    shape = helper.make_tensor("s", TensorProto.INT64, [1], [16 if doublings else size])
    nodes = [helper.make_node("ConstantOfShape", ["s"], ["c0"])]
    nodes += [helper.make_node("Concat", [f"c{n}"] * 2, [f"c{n + 1}"], axis=0) for n in range(doublings)]
    nodes += [
        helper.make_node("ReduceMax", [f"c{doublings}"], ["m"]),
        helper.make_node("Add", ["x", "m"], ["y"]),
    ]
    return _graph(path, nodes, shape, batch)


def _graph(path: Path, nodes: list[Any], initializer: Any, batch: int = 1) -> Path:
    import onnx
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 3, 112, 112]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [initializer])
    # Versions that every onnxruntime reads: otherwise it refuses the file before it sees the external data.
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def _zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in members.items():
            archive.writestr(name, body)
    return path


def _safetensors(path: Path, header: bytes, *, length: int | None = None, body: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + body)
    return path


def write_external_onnx(path: Path, location: str, *, offset: int = 0, dims: int = 1) -> Path:
    """Write a graph whose weight of `dims` numbers is in another file, at `location`."""
    from onnx import TensorProto, helper

    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[dims])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(4 * dims))):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    return _graph(path, [helper.make_node("Add", ["x", "w"], ["y"])], weight)


def _symbol(folder: Path, symbol: str, params: bytes = struct.pack("<QQQQ", 0x112, 0, 0, 0)) -> Path:
    _file(folder / "m-0000.params", params)
    return _file(folder / "m-symbol.json", symbol.encode())


def _params(shape: tuple[int, ...]) -> bytes:
    array = struct.pack("<Ii", 0xF993FAC9, 0) + struct.pack(f"<i{len(shape)}q", len(shape), *shape)
    return (
        struct.pack("<QQ", 0x112, 0)
        + struct.pack("<Q", 1)
        + array
        + struct.pack("<iii", 1, 0, 0)
        + struct.pack("<Q", 0)
    )


def _file(path: Path, data: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def _read_dataset(path: Path) -> None:
    dataset = open_dataset(path)
    dataset.read(0)


def _open(path: Path) -> None:
    open_model(path, torch.device("cpu"))


def _decode(path: Path) -> None:
    decode_rgb(path.read_bytes(), location=str(path))


def _bombs(folder: Path) -> dict[str, tuple[Callable[[], Path], Callable[[Path], object]]]:
    """Return for each name the function that writes a file, and the reader."""
    nested, f = "[" * 5_000_000, folder
    aliases = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    memo = b"\x80\x04r" + struct.pack("<I", 1 << 28) + b"N."
    return {
        "pickle: nested 1,000,000 deep": (lambda: _file(f / "d.bin", b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b"."), read_bin),
        "pickle.xz: 16,000,000 lists": (lambda: _file(f / "e.xz", lzma.compress(b"\x80\x04" + b"]" * 16_000_000 + b".")), read_bin),
        "JPEG: 65,500 pixels a side": (lambda: _file(f / "a.jpg", _jpeg(65500, 65500)), _decode),
        "JPEG: 6,300 pixels a side": (lambda: _file(f / "b.jpg", _jpeg(6300, 6300)), _decode),
        "PNG: 65,500 pixels a side": (lambda: _file(f / "a.png", _png(65500, 65500)), _decode),
        "PNG: 6,300 pixels a side": (lambda: _file(f / "b.png", _png(6300, 6300)), _decode),
        "PNG: 6,300 a side, 16 bits, alpha": (lambda: _file(f / "c.png", _png(6300, 6300, bits=16, kind=6)), _decode),
        "tar: nested label": (lambda: _tar(f / "t1", "a.json", nested[:1_000_000].encode()), _read_dataset),
        "tar: long name of 8 GiB claimed": (lambda: _tar(f / "t2", "././@LongLink", b"x", kind=b"L", size=8 * _GIB - 512), _read_dataset),
        "tar: pax header of 8 GiB claimed": (lambda: _tar(f / "t3", "pax", b"x", kind=b"x", size=8 * _GIB - 512), _read_dataset),
        "tar: image of 8 GiB claimed": (lambda: _tar(f / "t4", "a/a.jpg", b"x", size=8 * _GIB - 512), _read_dataset),
        "YAML: aliases, 2^40 values": (lambda: _file(f / "a.yaml", aliases.encode()), load_config),
        "YAML: nested 900,000 deep": (lambda: _file(f / "b.yaml", nested[:900_000].encode()), load_config),
        "zip: a .pt of 1 GiB in 1 MB": (lambda: _zip(f / "a.pt", {"archive/data.pkl": bytes(_GIB), "archive/version": b"3\n"}), read_weights),
        "pickle: a .pt before torch 1.6": (lambda: _file(f / "b.pt", pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + memo), read_weights),
        "safetensors: header of 2^60 bytes claimed": (lambda: _safetensors(f / "a.safetensors", b"{}", length=1 << 60), read_weights),
        "safetensors: nested header": (lambda: _safetensors(f / "b.safetensors", nested.encode()), read_weights),
        "safetensors: 300,000 tensors": (lambda: _safetensors(f / "c.safetensors", json.dumps({f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(300_000)}).encode()), read_weights),
        "safetensors: a tensor of 2^60 bytes claimed": (lambda: _safetensors(f / "d.safetensors", json.dumps({"t": {"dtype": "U8", "shape": [1 << 60], "data_offsets": [0, 1 << 60]}}).encode()), read_weights),
        "ONNX: data outside the folder": (lambda: write_external_onnx(f / "a.onnx", "../../../../../../etc/passwd"), _open),
        "ONNX: data at an absolute path": (lambda: write_external_onnx(f / "b.onnx", "/dev/zero"), _open),
        "ONNX: data at offset 2^62": (lambda: (_file(f / "w", b"0" * 64), write_external_onnx(f / "c.onnx", "w", offset=1 << 62))[1], _open),
        "ONNX: a weight of 2^40 numbers": (lambda: (_file(f / "w", b"0" * 64), write_external_onnx(f / "d.onnx", "w", dims=1 << 40))[1], _open),
        "MXNet: nested symbol": (lambda: _symbol(f / "m1", nested), _open),
        "MXNet: an array of 2^62 numbers": (lambda: _symbol(f / "m2", '{"nodes": [], "heads": [[0]]}', _params((1 << 62,))), _open),
        "MXNet: an empty array of 0 by 2^62 numbers": (lambda: _symbol(f / "m3", '{"nodes": [], "heads": [[0]]}', _params((0, 1 << 62))), _open),
        "embeddings: .npz of 2 GiB of zeros": (lambda: _npz(f / "e1.npz", rows=1 << 20), load_rows),
        "embeddings: .npz that claims 2^40 rows": (lambda: _npz(f / "e2.npz", claimed="{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 512)}"), load_rows),
        "embeddings: .npz with a header of 300 MiB": (lambda: _npz(f / "e3.npz", claimed=" " * (300 << 20)), load_rows),
        "embeddings: .npz with a nested header": (lambda: _npz(f / "e4.npz", claimed="(" * 9_000), load_rows),
        "embeddings: .parquet, 400 million equal numbers": (lambda: write_equal_embeddings(f / "e5.parquet", rows=100_000, size=4000, name="x"), load_rows),
        "embeddings: .parquet, a name of 1 MiB in 5,000 rows": (lambda: write_equal_embeddings(f / "e6.parquet", rows=5000, size=2, name="x" * (1 << 20)), load_rows),
        "scores: one slice of 100,000 characters among 200,000 rows": (lambda: _file(f / "a.csv", b"score,genuine,age\n" + b"0.5,1,y\n" * 200_000 + b"0.5,1," + b"x" * 100_000 + b"\n"), read_scores),
        "scores: 20 MiB of commas": (lambda: _file(f / "b.csv", b"," * (20 << 20)), read_scores),
        "ONNX: a constant of 2^33 zeros in 100 bytes": (lambda: write_constant_of_shape(f / "e.onnx"), _open),
        "ONNX: 16 zeros doubled 32 times": (lambda: write_constant_of_shape(f / "f.onnx", doublings=32), _open),
        "MXNet: nested attributes of a symbol": (lambda: _symbol(f / "m4", '{"nodes": ' + "[" * 900 + "]" * 900 + ', "heads": [[0]]}'), _open),
        "checkpoint: nested manifest": (lambda: _file(f / "step_00000001" / "manifest.json", nested.encode()).parent, Checkpoint.open),
    }  # fmt: skip


def measure(path: Path, read: Callable[[Path], object]) -> dict[str, object]:
    """Read a file in this process; return the seconds, the growth of memory and the message."""
    import gc

    gc.collect()
    since, message = time.process_time(), ""
    with resident_peak() as peak, memory_limited_to(_SAFETY):
        try:
            read(path)
        except FacetrainError as error:
            message = str(error)
        except BaseException as error:
            message = f"unexpected {type(error).__name__}: {str(error)[:300]}"
    seconds = time.process_time() - since
    return {"seconds": round(seconds, 2), "mib": peak.bytes >> 20, "message": message}


def _in_fork(call: Callable[[], str]) -> str:
    """Return the result of a function in a process that ends after it: what it frees is no free memory of this one."""
    receiver, sender = os.pipe()
    if not os.fork():
        os.write(sender, call().encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as file:
        text = file.read()
    _, status = os.wait()
    return text or json.dumps({"seconds": 0, "mib": 0, "message": f"unexpected end by signal {status}"})


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        for name, (write, read) in _bombs(Path(folder)).items():
            if names and name not in names:
                continue
            path = Path(_in_fork(lambda write=write: str(write())))  # type: ignore[misc]
            files = path.rglob("*") if path.is_dir() else [path]
            if path.name.endswith("-symbol.json"):
                files = path.parent.iterdir()
            size = sum(file.stat().st_size for file in files if file.is_file())
            found = _in_fork(lambda path=path, read=read: json.dumps(measure(path, read)))  # type: ignore[misc]
            print(json.dumps({"name": name, "bytes": size} | json.loads(found)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
