"""Fuzz targets: each takes any bytes and returns the outcome of reading them."""

from __future__ import annotations

import atexit
import io
import os
import pickle
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from facetrain.backbone.zoo import build_backbone
from facetrain.config.arcface_torch import convert
from facetrain.config.loading import load_config
from facetrain.data import column_cache
from facetrain.data.dataset import identity_name, image_name
from facetrain.data.formats.bin import read_bin
from facetrain.data.formats.record_index import build_catalog
from facetrain.data.formats.recordio import MAGIC, RecordHeader, RecordReader, RecordWriter, decode_record
from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import ConfigError, DataError, ImageError, ModelError, PairsError, RecordError
from facetrain.models.initialize_from import initialize_backbone
from facetrain.models.mxnet_network import open_mxnet
from tests.fuzz.framing import SEPARATOR
from tests.fuzz.outcome import outcome
from tests.fuzz.table_targets import remove_catalogs, table_seeds, table_targets, write_input
from tests.fuzz.verification_targets import verification_seeds, verification_targets
from tests.support.datasets import encoded_image, tf_example, tf_record, write_records
from tests.support.mxnet_files import write_iresnet

# In memory where the system has such a folder: the disk would be most of the time.
_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
_FOLDER = Path(tempfile.mkdtemp(prefix="facetrain-fuzz-", dir=_MEMORY))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
os.environ["HOME"] = str(_FOLDER / "home")  # datasets keep catalogs there, too
# The same few paths in each execution: to find them takes a third of it.
column_cache._cache_paths = lru_cache(lambda name, find=column_cache._cache_paths: tuple(find(name)))
_DATASET_FOLDERS = ("tf", "hf")
for _name in (*_DATASET_FOLDERS, "zip", "lmdb"):
    (_FOLDER / _name).mkdir()
(_FOLDER / "hf" / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
_MAGIC = struct.pack("<I", MAGIC)
_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_MIXTURE = b"datasets:\n  - path: one\n    weight: 0.5\n    identities: keep.txt"
_NARROW = {"layers": (1, 1, 1, 1), "widths": (2, 2, 2, 2), "embedding_size": 4, "image_size": 32}
_PEER = b"""from easydict import EasyDict as edict
config = edict()
config.margin_list = (1.0, 0.0, 0.4)
config.network = "r50"
config.sample_rate = 0.2
config.batch_size = 128 * 2
config.rec = "/train"
config.num_epoch = 20
config.warmup_epoch = config.num_epoch // 10
config.val_targets = ["lfw", "cfp_fp"]
"""


def recordio(data: bytes) -> str:
    """Read a file of these bytes sequentially, and at offsets taken from them."""
    write_input(f"{_FOLDER}/a.rec", data)
    reader = RecordReader(_FOLDER / "a.rec")

    def read() -> None:
        for offset in struct.unpack_from("<3q", data.ljust(24, b"\0")):
            size, place = divmod(offset, 2 * len(data) + 1)
            _compare_read_paths(reader, place - 4, size % 256)
        for _, payload in reader.scan():
            decode_record(payload, "x")

    try:
        return outcome(RecordError, read)
    finally:
        reader.close()


def _compare_read_paths(reader: RecordReader, offset: int, size: int) -> None:
    """Compare the fast path of reading a record with the full path."""
    fast = reader.image_at(offset, size)
    try:
        header, image = decode_record(reader.read_at(offset), "x")
    except RecordError:
        assert fast is None
        return
    # As text: NaN is not equal to itself.
    assert fast is None or (repr(fast[0]), fast[1]) == (repr(header.label), image)


def catalog(data: bytes) -> str:
    """Build the catalog of a dataset; the index is the part before the first empty line."""
    index, _, records = data.partition(b"\n\n")
    write_input(f"{_FOLDER}/train.idx", index)
    write_input(f"{_FOLDER}/train.rec", records)
    return outcome(RecordError, lambda: build_catalog(_FOLDER / "train.rec", _FOLDER / "train.idx"))


def image(data: bytes) -> str:
    """Decode an image."""
    return outcome(ImageError, lambda: decode_rgb(data, location="x"))


def bin_set(data: bytes) -> str:
    """Read a verification set."""
    path = _FOLDER / "a.bin"
    write_input(str(path), data)
    return outcome(PairsError, lambda: read_bin(path))


def config(data: bytes) -> str:
    """Read a run description."""
    path = _FOLDER / "run.yaml"
    write_input(str(path), data)
    return outcome(ConfigError, lambda: load_config(path))


def peer_config(data: bytes) -> str:
    """Translate a config of arcface_torch, which is Python that must not run."""
    path = _FOLDER / "peer.py"
    write_input(str(path), data)
    return outcome(ConfigError, lambda: convert(path))


def mixture(data: bytes) -> str:
    """Open a mixture of datasets, and lists of identities and of images."""
    described, _, listed = data.partition(b"\n\n")
    if not (_FOLDER / "one").exists():
        write_records(_FOLDER / "one", [0, 0, 1], size=4)
    write_input(f"{_FOLDER}/keep.txt", listed)
    write_input(f"{_FOLDER}/list.lst", listed)
    write_input(f"{_FOLDER}/mix.yaml", described)
    names = ("mix.yaml", "list.lst")
    return " ".join(outcome(DataError, partial(open_dataset, _FOLDER / name)) for name in names)


def mxnet_network(data: bytes) -> str:
    """Open a network in MXNet's files, and start from it: the graph is the part before the first empty line."""
    symbol, _, params = data.partition(b"\n\n")
    write_input(f"{_FOLDER}/m-symbol.json", symbol)
    write_input(f"{_FOLDER}/m-0000.params", params)
    graph = _FOLDER / "m-symbol.json"
    backbone = build_backbone("iresnet", **_NARROW)
    opened = outcome(ModelError, lambda: open_mxnet(graph))
    return f"{opened} {outcome(ModelError, lambda: initialize_backbone(backbone, graph, _faces))}"


def tf_records(data: bytes) -> str:
    """Open a TFRecord file: of a message with correct checksums, or, after the letter f, of any bytes."""
    return _open_and_read("tf", "a.tfrecord", data[1:] if data[:1] == b"f" else tf_record(data[1:]))


def tf_index(data: bytes) -> str:
    """Open TFace's index of a shard, and the index of img2tfrecord: the parts before and after a line."""
    named, _, unnamed = data.partition(SEPARATOR)
    write_input(f"{_FOLDER}/tf_index/named.txt", named)
    write_input(f"{_FOLDER}/tf_index/a.index", unnamed)
    remove_catalogs(f"{_FOLDER}/tf_index")
    paths = (_FOLDER / "tf_index" / "named.txt", _FOLDER / "tf_index")
    return " ".join(outcome(DataError, partial(_read_first, path)) for path in paths)


def _open_and_read(folder: str, name: str, data: bytes) -> str:
    """Open a dataset that is one file of these bytes, and read its first images, with their names."""
    path = f"{_FOLDER}/{folder}"
    write_input(f"{path}/{name}", data)
    remove_catalogs(path)

    place = _FOLDER / folder if folder in _DATASET_FOLDERS else _FOLDER / folder / name
    return outcome(DataError, partial(_read_first, place))


def _read_first(path: Path) -> None:
    """Open a dataset, and read its first images with their names."""
    dataset = open_dataset(path)
    for number in range(min(dataset.num_images, 4)):
        dataset.location(number), image_name(dataset, number)
        identity_name(dataset, int(dataset.labels[number]))
        dataset.read(number)


def _faces() -> Tensor:
    return torch.randn(2, 3, 32, 32)


def _lmdb(*, pickled: bool) -> bytes:
    """Return a database of three pages of 512 bytes: two meta pages and a leaf, as the library writes them."""
    values = {}
    for number in range(2):
        image = encoded_image(number, 2)
        value = b"\x92\xc4" + bytes([len(image)]) + image + bytes([number])
        values[b"%d" % number] = pickle.dumps((image, number), 4) if pickled else value
    values[b"__keys__"] = b"\x92\xa10\xa11"
    page, pointers, place = bytearray(512), [], 512
    for key in sorted(values):
        node = struct.pack("<4H", len(values[key]), 0, 0, len(key)) + key + values[key]
        place -= len(node) + len(node) % 2
        page[place : place + len(node)] = node
        pointers.append(place)
    lower = 16 + 2 * len(pointers)
    struct.pack_into(f"<Q4H{len(pointers)}H", page, 0, 2, 0, 2, lower, place, *pointers)
    metas = [
        struct.pack(
            "<Q4HII16xIHH40xIHH7Q", n, 0, 8, 0, 0, 0xBEEFC0DE, 1, 512, 0, 0, 0, 0, 1, 0, 1, 0, 3, 2, 2, n
        )
        for n in range(2)
    ]
    return b"".join(meta.ljust(512, b"\0") for meta in metas) + page


def _arrow(label: str) -> bytes:
    import pyarrow as pa

    image = {"bytes": encoded_image(0, 4), "path": "a.png"}
    table = pa.table({"image": [image] * 2, "label": pa.array([0, 1], pa.type_for_alias(label))})
    arrow = io.BytesIO()
    with pa.ipc.new_stream(arrow, table.schema) as stream:
        stream.write_table(table)
    return arrow.getvalue()


def _zip(method: int, *, listed: bool) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for number in range(2):
            archive.writestr(f"p{number}/{number}.png", encoded_image(number, 4))
        if listed:
            archive.writestr("labels.csv", "path,label\np1/1.png,0\np0/0.png,1\n")
    return file.getvalue()


def seeds() -> dict[str, list[bytes]]:
    """Return valid inputs of each target, to be mutated."""
    write_records(_FOLDER / "seed", [0, 0, 1], size=4)
    with RecordWriter(_FOLDER / "magic.rec") as writer:
        for key, payload in enumerate([_MAGIC * 3, b"abcd" + _MAGIC + b"ef", b""]):
            writer.write(key, RecordHeader(2, (1.0, 2.0), key), payload)
    records = [(_FOLDER / "seed" / "train.rec").read_bytes(), (_FOLDER / "magic.rec").read_bytes()]
    index = (_FOLDER / "seed" / "train.idx").read_bytes().strip()
    sets = [
        pickle.dumps(([encoded_image(0, 4), encoded_image(1, 4)], [True]), protocol=p) for p in (2, 3, 4, 5)
    ]
    write_iresnet(_FOLDER, build_backbone("iresnet", **_NARROW))
    example = tf_example(image=encoded_image(0, 4), label=1, filename=b"a/1.png")
    floats = tf_example(image=encoded_image(0, 4), label=1.0)
    for name in ("tf_index", "tf_index/TFR-X"):
        (_FOLDER / name).mkdir(exist_ok=True)
        (_FOLDER / name / "a-00000.tfrecord").write_bytes(tf_record(example))
    network = [(_FOLDER / name).read_bytes() for name in ("model-symbol.json", "model-0000.params")]
    return {
        "recordio": records,
        "catalog": [index + b"\n\n" + records[0]],
        "image": [
            encoded_image(0, 8),
            b"\xff\xd8\xff\xe0\0\x10JFIF\0\x01\1\0\0\1\0\1\0\0\xff\xc0\0\x0b\x08\0\x08\0\x08\1\1",
        ],
        "bin_set": sets,
        "config": [path.read_bytes() for path in sorted(_CONFIGS.glob("*.yaml"))],
        "peer_config": [_PEER],
        "mixture": [
            _MIXTURE + b"\n\n0\n1\n",
            _MIXTURE + b"\n\na/1.jpg\tann\n",
            _MIXTURE + b"\n\n1\t0.0\ta.png\n",
        ],
        "mxnet_network": [b"\n\n".join(network)],
        "saved_dataset": [_arrow("int64"), _arrow("timestamp[us]")],
        "tf_index": [b"TFR-X\t0\t0\t3\nTFR-X\t0\t0\t1\n--\nraw/ann/1.jpg\t0\t0\nraw/bob/2.jpg\t0\t0\n"],
        "tf_records": [b"m" + example, b"m" + floats, b"f" + 2 * tf_record(example)],
        "lmdb_database": [_lmdb(pickled=False), _lmdb(pickled=True)],
        "zip_archive": [_zip(zipfile.ZIP_STORED, listed=True), _zip(zipfile.ZIP_DEFLATED, listed=False)],
    } | {**table_seeds(_FOLDER), **verification_seeds(_FOLDER)}


TARGETS: dict[str, Callable[[bytes], str]] = {
    "recordio": recordio,
    "catalog": catalog,
    "image": image,
    "bin_set": bin_set,
    "config": config,
    "peer_config": peer_config,
    "mixture": mixture,
    "mxnet_network": mxnet_network,
    "zip_archive": partial(_open_and_read, "zip", "a.zip"),
    "lmdb_database": partial(_open_and_read, "lmdb", "a.lmdb"),
    "tf_records": tf_records,
    "tf_index": tf_index,
    "saved_dataset": partial(_open_and_read, "hf", "a.arrow"),
} | {**table_targets(_FOLDER), **verification_targets(_FOLDER)}
