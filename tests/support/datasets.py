"""Small datasets of random images for tests."""

from __future__ import annotations

import struct
from pathlib import Path

import cv2
import numpy as np

from facetrain.data.dataset import FaceDataset
from facetrain.data.formats.record_dataset import open_records
from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.formats.tfrecord import masked_crc32c


def encoded_image(number: int, size: int = 16) -> bytes:
    """Return a small PNG that differs from number to number."""
    image = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return bytes(cv2.imencode(".png", image)[1])


def write_records(folder: Path, labels: list[int], *, size: int = 16) -> Path:
    """Write train.rec and train.idx in InsightFace's layout: header, images from key 1, identity records."""
    folder.mkdir(parents=True, exist_ok=True)
    past = len(labels) + 1
    identities = sorted(set(labels))
    with RecordWriter(folder / "train.rec") as writer:
        writer.write(0, RecordHeader(flag=2, labels=(float(past), float(past + len(identities)))), b"")
        for key, label in enumerate(labels, start=1):
            writer.write(key, RecordHeader.of_image(label, key), encoded_image(key, size))
        for number, label in enumerate(identities):
            keys = [key for key, other in enumerate(labels, start=1) if other == label]
            header = RecordHeader(flag=2, labels=(float(keys[0]), float(keys[-1] + 1)))
            writer.write(past + number, header, b"")
    return folder


def tf_example(**features: bytes | int | float | None) -> bytes:
    """Return a tf.Example message with one value per feature; None: a list of whole numbers without any."""

    def field(number: int, data: bytes) -> bytes:
        return _varint(number << 3 | 2) + _varint(len(data)) + data

    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            values = field(1, field(1, value))
        elif isinstance(value, float):
            values = field(2, field(1, struct.pack("<f", value)))
        else:
            values = field(3, b"" if value is None else field(1, _varint(value)))
        entries += field(1, field(1, name.encode()) + field(2, values))
    return field(1, entries)


def tf_record(message: bytes) -> bytes:
    """Return a record of a TFRecord file."""
    length = len(message).to_bytes(8, "little")
    parts = [length, message]
    return b"".join(part + masked_crc32c(part).to_bytes(4, "little") for part in parts)


def _varint(value: int) -> bytes:
    value, out = value % (1 << 64), bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def images_of(dataset: FaceDataset) -> list[tuple[int, bytes]]:
    """Return (label, encoded image) of every image."""
    return [(int(dataset.labels[index]), dataset.read(index)) for index in range(dataset.num_images)]


def damage_records(rec: Path, images: tuple[int, ...]) -> None:
    """Overwrite the first bytes of images in a record file, by their indices: they can no longer be decoded."""
    offset = open_records(rec).columns.arrays["offset"]
    with rec.open("r+b") as file:
        for index in images:
            file.seek(int(offset[index]) + 32)
            file.write(bytes(8))
