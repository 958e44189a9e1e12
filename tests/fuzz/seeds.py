"""Valid inputs of the fuzz targets, to be mutated."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from facetrain.backbone.zoo import build_backbone
from facetrain.checkpoint.manifest import FORMAT
from facetrain.data.dataset import FaceDataset
from facetrain.data.formats.recordio import MAGIC, RecordHeader, RecordWriter
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.clean_report import FORMAT as REPORT_FORMAT
from facetrain.data.tools.clean_report import fingerprint
from facetrain.embeddings.embedding_files import save_embeddings
from facetrain.embeddings.embeddings import Embeddings
from facetrain.models.model_file import THRESHOLDS_KEY
from tests.fuzz.framing import SEPARATOR, members_of, zip_of
from tests.fuzz.target import FOLDER
from tests.support.datasets import encoded_image, write_records
from tests.support.mxnet_files import write_iresnet

_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_MAGIC = struct.pack("<I", MAGIC)
NARROW = {"layers": (1, 1, 1, 1), "widths": (2, 2, 2, 2), "embedding_size": 4, "image_size": 32}
EMBEDDINGS = Embeddings(np.eye(3, 4, dtype=np.float32), list("abc"), np.array([0, 1, -1]), quality=np.ones(3))
PEER = b"""from easydict import EasyDict as edict
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
LANDMARKS = b"a.jpg,1,2,3,4,5,6,7,8,9,10\nb.jpg,1.5,2e1,3,4,5,6,7,8,9,10\n"
_CARD = b"""name: faces
origin: https://example.org
license: CC BY-NC 4.0
consent: given
people: 10
images: 100
kind: real
digest: sha256:00
"""
CARDS = [_CARD, b"- name: a\n- name: b\n"]
IJB = SEPARATOR.join([
    b"1.jpg 1 1\n2.jpg 2 2", b"1.jpg 1 2 3 4 5 6 7 8 9 10 0.9\n2.jpg 1 2 3 4 5 6 7 8 9 10 0.8", b"1 2 0\n1 1 1",
    b"TEMPLATE_ID,SUBJECT_ID\n1,7", b"TEMPLATE_ID,SUBJECT_ID\n2,7\n",
])  # fmt: skip
_THRESHOLD = {
    "fmr": 1e-3, "cosine": 0.3, "fmr_interval": [0.0, 0.1], "fnmr": 0.1, "fnmr_interval": [0.0, 0.2], "data": "x",
    "impostors": 1000, "subjects": 50,
}  # fmt: skip
THRESHOLDS = json.dumps(
    [_THRESHOLD, _THRESHOLD | {"fnmr": None, "fnmr_interval": None, "false_accepts": 1}]
).encode()
_FILE = {"name": "rows_00000_of_00001.safetensors", "size": 3, "sha256": "0" * 64, "start": 0, "stop": 10}
CHECKPOINT = json.dumps({
    "format": FORMAT, "sha256": "", "step": 3, "world_size": 1, "num_classes": 10, "files": [_FILE],
    "meta": {"run_id": "0" * 16}, "metrics": {"loss": 1.0},
}).encode()  # fmt: skip
SETTINGS = (
    b'{"pretrained_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}, "conf": {"color_space": "BGR"}}'
)


def records() -> list[bytes]:
    write_records(FOLDER / "seed", [0, 0, 1], size=4)
    with RecordWriter(FOLDER / "magic.rec") as writer:
        for key, payload in enumerate([_MAGIC * 3, b"abcd" + _MAGIC + b"ef", b""]):
            writer.write(key, RecordHeader(2, (1.0, 2.0), key), payload)
    return [(FOLDER / name).read_bytes() for name in ("seed/train.rec", "magic.rec")]


def indexed_records() -> list[bytes]:
    data = records()[0]
    return [(FOLDER / "seed" / "train.idx").read_bytes().strip() + SEPARATOR + data]


def images() -> list[bytes]:
    jpeg = b"\xff\xd8\xff\xe0\0\x10JFIF\0\x01\1\0\0\1\0\1\0\0\xff\xc0\0\x0b\x08\0\x08\0\x08\1\1"
    return [encoded_image(0, 8), jpeg]


def bin_sets() -> list[bytes]:
    pair = [encoded_image(0, 4), encoded_image(1, 4)]
    return [pickle.dumps((pair, [True]), protocol=protocol) for protocol in (2, 3, 4, 5)]


def configs() -> list[bytes]:
    return [path.read_bytes() for path in sorted(_CONFIGS.glob("*.yaml"))]


def mixtures() -> list[bytes]:
    described = b"datasets:\n  - path: one\n    weight: 0.5\n    identities: keep.txt\n\n"
    return [described + listed for listed in (b"0\n1\n", b"a/1.jpg\tann\n", b"1\t0.0\ta.png\n")]


def mxnet() -> list[bytes]:
    write_iresnet(FOLDER, build_backbone("iresnet", **NARROW))
    return [
        SEPARATOR.join((FOLDER / name).read_bytes() for name in ("model-symbol.json", "model-0000.params"))
    ]


def msgpack_lists() -> list[bytes]:
    """Return the value of an LMDB database, and its list of keys."""
    image = encoded_image(0, 2)
    return [b"\x92\xc4" + bytes([len(image)]) + image + b"\xcd\x01\x00", b"\x92\xa10\xd9\x011"]


def tars() -> list[bytes]:
    return [b"m" + _tar(tarfile.GNU_FORMAT), b"f" + _tar(tarfile.PAX_FORMAT)]


def _tar(form: int) -> bytes:
    members = {"a/" + "x" * 120 + ".jpg": encoded_image(0, 4), "b.jpg": b"y", "b.cls": b"3", "c.png": b"z"}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, content in (members | {"c.json": b'{"label": "k"}'}).items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()[: archive.offset]  # without the padding


def scores() -> list[bytes]:
    table = b"score,genuine,subject_1,subject_2,quality,age\n0.5,1,x,x,0.1,3\n-1e-3,false,x,y,2,14\n"
    return [table, table.replace(b"score", b"distance"), "\ufeffscore,genuine\n1,0\n".encode()]


def slices() -> list[bytes]:
    return [b"age,subject,quality\n3,x,1\n4,y,2\n", b"age,pose\n3,left\n"]


def npz() -> list[bytes]:
    save_embeddings(FOLDER / "known.npz", EMBEDDINGS)
    known, unpacked = (FOLDER / "known.npz").read_bytes(), io.BytesIO()
    np.savez_compressed(
        unpacked, embedding=EMBEDDINGS.embedding, name=np.array(["a", "b", "c"]), label=EMBEDDINGS.label
    )
    return [known, unpacked.getvalue(), SEPARATOR.join(members_of(known).values())]


def parquet() -> list[bytes]:
    save_embeddings(FOLDER / "known.parquet", EMBEDDINGS)
    return [(FOLDER / "known.parquet").read_bytes()]


def names() -> list[bytes]:
    return [
        b'key,name\n1,ann/a.jpg\n2,"b,""c"".jpg"\n3,d.jpg\n'
        + SEPARATOR
        + b'identity,name\n0,"ann\njr"\n1,bob\n'
    ]


def pair_lists() -> list[bytes]:
    for name in ("ann/ann_0001", "ann/ann_0002", "bob/bob_0003", "ann/1", "ann/2", "a", "b"):
        path = FOLDER / "ann_bob" / f"{name}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"image")
    return [b"10 300\nann 1 2\nann 1 bob 3\n", b"ann/1.jpg ann/2.jpg 1\n", b"a.jpg 0\nb.jpg 0\n"]


def landmark_files() -> list[bytes]:
    return [_npy(np.full((2, 5, 2), 0.5, np.float32))]


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@lru_cache
def cleaned_dataset() -> FaceDataset:
    """Return the dataset of the clean reports."""
    return open_dataset(write_records(FOLDER / "reported", [0, 0, 1], size=4))


def clean_reports() -> list[bytes]:
    decision = {"number": 1, "apply": True, "image": 0, "identity": 0, "target": 1, "similarity": 0.5}
    report = {"format": REPORT_FORMAT, "images": 3, "fingerprint": fingerprint(cleaned_dataset())}
    return [json.dumps(report | {"decisions": [decision]}).encode()]


def described_model() -> bytes:
    """Return a model file of a narrow IResNet with thresholds."""
    described = {"backbone": {"name": "iresnet"} | NARROW, THRESHOLDS_KEY: [_THRESHOLD]}
    network = build_backbone("iresnet", **NARROW)
    return save(network.state_dict(), metadata={"facetrain": json.dumps(described)})


def descriptions() -> list[bytes]:
    data = described_model()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [header["__metadata__"]["facetrain"].encode(), b"f" + data]


@lru_cache
def _torch_file() -> bytes:
    torch.save({"w": torch.ones(2, 2), "b": torch.zeros(1)}, FOLDER / "seed.pt")
    return (FOLDER / "seed.pt").read_bytes()


def torch_files() -> list[bytes]:
    """Return a file of torch.save, and its pickle alone."""
    return [
        _torch_file(),
        *(data for name, data in members_of(_torch_file()).items() if name.endswith("data.pkl")),
    ]


def torch_archive(data: bytes) -> bytes:
    """Pack a pickle with the other members of an archive of torch.save; or take an archive as it is."""
    if data[:2] == b"PK":
        return data
    members = members_of(_torch_file())
    return zip_of({name: data if name.endswith("data.pkl") else old for name, old in members.items()})
