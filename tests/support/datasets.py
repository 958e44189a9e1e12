"""Small datasets of random images for tests."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import cv2
import numpy as np
from torch import Tensor

from facetrain.data.dataset import FaceDataset
from facetrain.data.formats.record_dataset import open_records
from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.loading.loader import Batch


def batch_of(
    step: int, epoch: int, image_BHWC: Tensor, label_B: Tensor, sample_B: Tensor, **others: Tensor
) -> Batch:
    """Return a micro-batch on the CPU, of which no image was replaced unless `read_B` says so."""
    return Batch(
        step, epoch, image_BHWC, label_B, sample_B, **{"host_label_B": label_B, "read_B": sample_B} | others
    )


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


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    """Write a tar file of members in memory."""
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


class OneBad(FaceDataset):
    """A dataset whose image 5 is damaged."""

    def __init__(self, dataset):
        self.num_images, self.num_classes, self.labels = (
            dataset.num_images,
            dataset.num_classes,
            dataset.labels,
        )
        self.location = dataset.location
        self._dataset = dataset

    def read(self, number):
        return b"\xff\xd8 damaged" if number == 5 else self._dataset.read(number)
