"""Exchange of RecordIO files with MXNet 1.9.1, which `make interop` installs."""

import hashlib
import json
import random
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from facetrain.data.formats.record_index import read_index
from facetrain.data.formats.recordio import MAGIC, RecordHeader, RecordReader, RecordWriter, decode_record
from facetrain.data.open_dataset import open_dataset
from tests.support.datasets import encoded_image, write_records

_ROOT = Path(__file__).resolve().parents[2]
_PEER = _ROOT / "build" / "interop"
_MAGIC = struct.pack("<I", MAGIC)

pytestmark = pytest.mark.skipif(
    not (_PEER / "ready").exists(), reason="MXNet is not installed; run `make interop`"
)


def mxnet(do, *args):
    """Call a function of mxnet_peer.py in the environment that has MXNet."""
    done = subprocess.run(
        [_PEER / "bin" / "python", "-W", "ignore", _ROOT / "tests" / "interop" / "mxnet_peer.py"],
        input=json.dumps({"do": do, "with": [str(a) if isinstance(a, Path) else a for a in args]}),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def payloads(count):
    """Bytes of many lengths, some with the magic at every kind of position."""
    rng = random.Random(7)
    return [
        b"".join(
            rng.choice([_MAGIC, b"a", b"bc", b"wxyz", rng.randbytes(40)]) for _ in range(rng.randrange(9))
        )
        for _ in range(count)
    ]


def digest(payload):
    return hashlib.sha256(payload).hexdigest()


def test_mxnet_reads_what_we_write(tmp_path):
    rec, idx = tmp_path / "a.rec", tmp_path / "a.idx"
    wanted = {}
    with RecordWriter(rec) as writer:
        for key, payload in enumerate(payloads(200)):
            labels = (float(key % 5),) if key % 3 else (float(key % 5), 2.0, 3.5)
            header = RecordHeader(0 if key % 3 else 3, labels, id=key)
            writer.write(key, header, payload)
            wanted[str(key)] = [list(labels), digest(payload)]
    seen = mxnet("read_indexed", rec, idx)
    assert {key: [record["labels"], record["sha256"]] for key, record in seen.items()} == wanted
    assert [record["sha256"] for record in mxnet("read_sequential", rec)] == [w[1] for w in wanted.values()]


def test_we_read_what_mxnet_writes_and_write_it_with_the_same_bytes(tmp_path):
    rec, idx = tmp_path / "a.rec", tmp_path / "a.idx"
    written = []
    for key, payload in enumerate(payloads(200)):
        flag = (0, 2, 3)[key % 3]
        written.append((key * 3, flag, [float(key + n) for n in range(max(flag, 1))], payload))
    mxnet("write", rec, idx, [(key, flag, labels, payload.hex()) for key, flag, labels, payload in written])
    reader, (keys, offsets) = RecordReader(rec), read_index(rec, idx)
    assert keys.tolist() == [key for key, *_ in written]
    with RecordWriter(tmp_path / "b.rec") as writer:
        for (key, flag, labels, payload), offset in zip(written, offsets.tolist(), strict=True):
            header, seen = decode_record(reader.read_at(offset, key), "")
            assert (header.flag, list(header.labels), seen) == (flag, labels, payload)
            writer.write(key, header, seen)
    assert (tmp_path / "b.rec").read_bytes() == rec.read_bytes()
    assert (tmp_path / "b.idx").read_bytes() == idx.read_bytes()


def test_insightface_reads_the_same_images_and_labels_from_our_dataset(tmp_path):
    labels = [n // 3 for n in range(20)]
    dataset = open_dataset(write_records(tmp_path, labels))
    ours = [[int(dataset.labels[n]), digest(dataset.read(n))] for n in range(dataset.num_images)]
    assert mxnet("read_as_insightface", tmp_path / "train.rec", tmp_path / "train.idx") == ours
    assert len(ours) == 20


def test_mxnet_ignores_the_exact_label(tmp_path):
    label = 2**24 + 1
    with RecordWriter(tmp_path / "a.rec") as writer:
        writer.write(0, RecordHeader.of_image(label, 0), encoded_image(0))
    (seen,) = mxnet("read_sequential", tmp_path / "a.rec")
    assert seen["labels"] == [float(np.float32(label))] and seen["sha256"] == digest(encoded_image(0))


def test_a_folder_packed_by_im2rec_has_the_same_images(tmp_path):
    images = {}
    for person in range(3):
        (tmp_path / "faces" / f"p{person}").mkdir(parents=True)
        for number in range(person + 1):
            content = encoded_image(10 * person + number)
            (tmp_path / "faces" / f"p{person}" / f"{number}.png").write_bytes(content)
            images[digest(content)] = person
    (script,) = _PEER.glob("lib/python*/site-packages/mxnet/tools/im2rec.py")
    command = [_PEER / "bin" / "python", "-W", "ignore", script, tmp_path / "train", tmp_path / "faces"]
    for options in (["--list", "--recursive"], ["--pass-through"]):
        subprocess.run([*command, *options], check=True, capture_output=True)
    dataset = open_dataset(tmp_path)
    seen = {digest(dataset.read(n)): int(dataset.labels[n]) for n in range(dataset.num_images)}
    assert seen == images and dataset.num_classes == 3
