"""Format benchmark: images of each dataset format, read into batches as in training, beside the JPEG decoder alone.

One thread reads random images of each format and of the list of encoded images, a batch at a time, in random order: a
busy machine slows all of them down by the same share. Times are CPU time.
"""

from __future__ import annotations

import json
import statistics
import struct
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from facetrain.bench.generated_dataset import open_or_generate
from facetrain.data.dataset import FaceDataset
from facetrain.data.formats.crc32c import masked_crc32c
from facetrain.data.formats.image_writers import (
    LabeledImage,
    write_lmdb,
    write_parquet,
    write_webdataset,
    write_zip,
)
from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.images.decode import decode_rgb
from facetrain.data.loading.batch_slots import BatchSlots
from facetrain.data.loading.reader import ImageReader, ReadRequest
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError

_BATCH = 128
_DECODER, _ZLIB, _DEFLATED = "cv2.imdecode", "zlib", "zip, deflated"
Images = list[LabeledImage]


def measure_formats(
    folder: Path | None, *, images: int, rounds: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Return, for each format, the CPU time per image in µs and the rate as a share of the decoder's.

    Both are from the medians of the times. For a deflated zip, `share_of_zlib_and_decoder` counts the decompression
    of the images as part of decoding. Formats whose package is not installed are left out.

    Args:
        folder: dataset whose images are written in each format; generated images of about 8 kB if None.
        images: number of images.
        rounds: repetitions; the report has the medians.
        device: where the batches are needed.
    """
    with open_or_generate(folder) as source, tempfile.TemporaryDirectory() as scratch:
        count = min(images, source.num_images)
        labels = np.unique(source.labels[:count], return_inverse=True)[1].tolist()
        chosen = [
            LabeledImage(f"{labels[n]:06d}/{n:06d}.jpg", labels[n], source.read(n)) for n in range(count)
        ]
        datasets = dict(_written(Path(scratch), chosen))
        random = np.random.default_rng(0)
        order = random.permutation(count)
        side = decode_rgb(chosen[0].data, location=source.location(0)).shape[0]
        slots = BatchSlots(1, _BATCH, side)
        readers = {name: ImageReader(dataset, slots, skip_bad=False) for name, dataset in datasets.items()}
        packed = [_deflated(image.data) for image in chosen]
        rounds_of: dict[str, list[float]] = {name: [] for name in [_DECODER, _ZLIB, *readers]}
        for _ in range(rounds):
            spent = dict.fromkeys(rounds_of, 0.0)
            for start in range(0, count, _BATCH):
                part = order[start : start + _BATCH].tolist()
                # In random order: the first one after another memory was in use is slower.
                for name in random.permutation(list(spent)).tolist():
                    if name == _DECODER:
                        spent[name] += _cpu_time(_decode, [chosen[n].data for n in part])
                    elif name == _ZLIB:
                        spent[name] += _cpu_time(_inflate, [packed[n] for n in part])
                    else:
                        spent[name] += _cpu_time(_batch, readers[name], slots, part, device)
            for name, seconds in spent.items():
                rounds_of[name].append(seconds / count)
    time_of = {name: statistics.median(seconds) for name, seconds in rounds_of.items()}
    report = {name: {"microseconds": 1e6 * seconds} for name, seconds in time_of.items()}
    for name in datasets:
        report[name]["share_of_decoder"] = time_of[_DECODER] / time_of[name]
    report[_DEFLATED]["share_of_zlib_and_decoder"] = (time_of[_ZLIB] + time_of[_DECODER]) / time_of[_DEFLATED]
    return report


def _cpu_time(action: Callable[..., object], *arguments: object) -> float:
    since = time.thread_time()
    action(*arguments)
    return time.thread_time() - since


def _decode(images: list[bytes]) -> None:
    for image in images:
        cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR)


def _deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def _inflate(images: list[bytes]) -> None:
    for image in images:
        zlib.decompressobj(-zlib.MAX_WBITS).decompress(image)


def _batch(reader: ImageReader, slots: BatchSlots, numbers: list[int], device: torch.device) -> torch.Tensor:
    """Read and decode images into a batch on the device, uint8 (B, height, width, 3)."""
    result = reader.read(ReadRequest(0, 0, tuple(numbers)))
    if result.error is not None:
        raise result.error
    return torch.from_numpy(slots.image[0, : len(numbers)]).to(device)


def _written(folder: Path, images: Images) -> list[tuple[str, FaceDataset]]:
    """Write the images in each format, and open the datasets."""
    datasets = []
    for name, (file, write) in _WRITERS.items():
        path = folder / name.replace(" ", "_").replace(",", "") / file
        path.parent.mkdir()
        path.mkdir() if not path.suffix else None
        try:
            write(path, images)
            datasets.append((name, open_dataset(path)))
        except (DataError, ImportError):  # the format's package is not installed
            continue
    return datasets


def _write_recordio(folder: Path, images: Images) -> None:
    with RecordWriter(folder / "train.rec") as writer:
        for key, image in enumerate(images):
            writer.write(key, RecordHeader.of_image(image.label, key), image.data)


def _write_deflated(path: Path, images: Images) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for image in images:
            archive.writestr(str(image.name), image.data)


def _write_tar_gz(folder: Path, images: Images) -> None:
    write_webdataset(folder, images, [])
    with (
        tarfile.open(folder / "000000.tar") as plain,
        tarfile.open(folder / "000000.tar.gz", "w:gz", compresslevel=1) as packed,
    ):
        for member in plain:
            packed.addfile(member, plain.extractfile(member))
    (folder / "000000.tar").unlink()


def _write_tfrecord(folder: Path, images: Images) -> None:
    with (folder / "a-00000.tfrecord").open("wb") as file:
        for image in images:
            # tf.train.Example: features { feature { "image" : bytes_list, "label" : int64_list } }.
            data = _field(1, _feature("image", 1, _field(1, image.data)))
            label = _field(1, _feature("label", 3, _field(1, _varint(image.label))))
            message = _field(1, data + label)
            length = struct.pack("<Q", len(message))
            file.write(length + struct.pack("<I", masked_crc32c(length)))
            file.write(message + struct.pack("<I", masked_crc32c(message)))


def _feature(name: str, kind: int, values: bytes) -> bytes:
    return _field(1, name.encode()) + _field(2, _field(kind, values))


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    groups = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([group | 128 for group in groups[:-1]] + groups[-1:])


def _write_compressed_parquet(folder: Path, images: Images) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({"image": [image.data for image in images], "label": [image.label for image in images]})
    pyarrow.parquet.write_table(table, folder / "a.parquet", compression="snappy", row_group_size=100)


def _write_saved(folder: Path, images: Images) -> None:
    """Write what `Dataset.save_to_disk` of Hugging Face's `datasets` writes."""
    import pyarrow as pa

    columns: dict[str, Any] = {
        "image": [{"bytes": image.data, "path": image.name} for image in images],
        "label": [image.label for image in images],
    }
    table, name = pa.table(columns), "data-00000-of-00001.arrow"
    with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}), encoding="utf-8")


def _write_folder(folder: Path, images: Images) -> None:
    for image in images:
        path = folder / str(image.name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(image.data)


_WRITERS: dict[str, tuple[str, Callable[[Path, Images], None]]] = {
    "recordio": ("recordio", _write_recordio),
    "image folder": ("folder", _write_folder),
    "zip, stored": ("a.zip", lambda path, images: write_zip(path, images, [])),
    _DEFLATED: ("a.zip", _write_deflated),
    "lmdb": ("a.lmdb", lambda path, images: write_lmdb(path, images, sorted({str(i.label) for i in images}))),
    "tfrecord": ("shards", _write_tfrecord),
    "webdataset": ("shards", lambda path, images: write_webdataset(path, images, [])),
    "tar.gz": ("shards", _write_tar_gz),
    "parquet, plain": ("shards", lambda path, images: write_parquet(path, images, [])),
    "parquet, snappy": ("shards", _write_compressed_parquet),
    "saved hugging face": ("saved", _write_saved),
}
"""Name of the file or folder of each format, and its writer."""
