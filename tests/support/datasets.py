"""Small datasets of random images for tests."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from facetrain.data.dataset import FaceDataset
from facetrain.data.formats.record_dataset import open_records
from facetrain.data.formats.recordio import RecordHeader, RecordWriter


def encoded_image(number: int, size: int = 16) -> bytes:
    """Return a small PNG that differs from number to number."""
    image = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return bytes(cv2.imencode(".png", image)[1])


def smooth_image(number: int, size: int) -> np.ndarray:
    """Return pixels without sharp edges, uint8 (size, size, 3), as photographs have them."""
    coarse = np.random.default_rng(number).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return np.asarray(cv2.resize(coarse, (size, size), interpolation=cv2.INTER_CUBIC))


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
