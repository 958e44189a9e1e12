"""Images of each dataset format, read into batches as in training, beside the JPEG decoder alone.

One thread reads random images of each format and of the list of encoded images, a batch at a time, in random order: a
busy machine slows all of them down by the same share. Times are CPU time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import cv2
import numpy as np

from benchmarks.common import run, seconds_in_turn
from facetrain.bench.generated_dataset import open_or_generate
from facetrain.data.dataset import FaceDataset
from facetrain.data.formats.image_writers import LabeledImage, write_parquet, write_webdataset
from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.images.decode import decode_rgb
from facetrain.data.loading.reader import BatchSlots, ImageReader, ReadRequest
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError

_BATCH = 128
_DECODER = "cv2.imdecode"
Images = list[LabeledImage]


def measure_formats(
    data: Path | None = None, images: int = 4096, rounds: int = 5
) -> dict[str, dict[str, float]]:
    """Return, for each format, the CPU time per image in µs and the rate as a share of the decoder's.

    Formats whose package is not installed are left out.

    Args:
        data: dataset whose images are written in each format; generated images of about 8 kB if None.
        images: number of images.
        rounds: repetitions; the report has the medians.
    """
    with open_or_generate(data) as source, tempfile.TemporaryDirectory() as scratch:
        count = min(images, source.num_images)
        labels = np.unique(source.labels[:count], return_inverse=True)[1].tolist()
        chosen = [
            LabeledImage(f"{labels[n]:06d}/{n:06d}.jpg", labels[n], source.read(n)) for n in range(count)
        ]
        side = decode_rgb(chosen[0].data, location=source.location(0)).shape[0]
        slots = BatchSlots(1, _BATCH, side)
        datasets = dict(_written(Path(scratch), chosen))
        readers = {name: ImageReader(dataset, slots, skip_bad=False) for name, dataset in datasets.items()}
        order = np.random.default_rng(0).permutation(count)
        rounds_of: dict[str, list[float]] = {name: [] for name in (_DECODER, *readers)}
        for _ in range(rounds):
            spent = dict.fromkeys(rounds_of, 0.0)
            for start in range(0, count, _BATCH):
                batch = order[start : start + _BATCH].tolist()
                calls: dict[str, Callable[[], object]] = {
                    _DECODER: partial(_decode, [chosen[n].data for n in batch])
                }
                calls |= {name: partial(_read, reader, batch) for name, reader in readers.items()}
                for name, (seconds,) in seconds_in_turn(calls, rounds=1, clock=time.thread_time).items():
                    spent[name] += seconds
            for name, seconds in spent.items():
                rounds_of[name].append(seconds / count)
    time_of = {name: statistics.median(seconds) for name, seconds in rounds_of.items()}
    report = {name: {"microseconds": 1e6 * seconds} for name, seconds in time_of.items()}
    for name in datasets:
        report[name]["share_of_decoder"] = time_of[_DECODER] / time_of[name]
    return report


def _decode(images: list[bytes]) -> None:
    for image in images:
        cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR)


def _read(reader: ImageReader, numbers: list[int]) -> None:
    """Read and decode images into a batch, uint8 (B, height, width, 3)."""
    result = reader.read(ReadRequest(0, 0, tuple(numbers)))
    if result.error is not None:
        raise result.error


def _written(folder: Path, images: Images) -> Iterator[tuple[str, FaceDataset]]:
    """Write the images in each format, and open the datasets."""
    for number, (name, write) in enumerate(_WRITERS.items()):
        path = folder / str(number)
        path.mkdir()
        try:
            write(path, images)
            yield name, open_dataset(path)
        except (DataError, ImportError):  # The format's package is not installed.
            continue


def _write_recordio(folder: Path, images: Images) -> None:
    with RecordWriter(folder / "train.rec") as writer:
        for key, image in enumerate(images):
            writer.write(key, RecordHeader.of_image(image.label, key), image.data)


def _write_compressed_parquet(folder: Path, images: Images) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({"image": [image.data for image in images], "label": [image.label for image in images]})
    pyarrow.parquet.write_table(table, folder / "a.parquet", compression="snappy", row_group_size=100)


def _write_folder(folder: Path, images: Images) -> None:
    for image in images:
        path = folder / str(image.name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(image.data)


_WRITERS: dict[str, Callable[[Path, Images], None]] = {
    "recordio": _write_recordio,
    "image folder": _write_folder,
    "webdataset": lambda path, images: write_webdataset(path, images, []),
    "parquet, plain": lambda path, images: write_parquet(path, images, []),
    "parquet, snappy": _write_compressed_parquet,
}
"""Writer of each format."""

if __name__ == "__main__":
    run(measure_formats)
