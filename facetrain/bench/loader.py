"""How fast images arrive, beside the bare JPEG decoder and beside the usual way, on the same cores."""

from __future__ import annotations

import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from facetrain.data.augment import Augment
from facetrain.data.dataset import FaceDataset
from facetrain.data.decode import encode_jpeg
from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.loader import Loader, LoaderSettings
from facetrain.data.open_dataset import open_dataset
from facetrain.data.sampler import GlobalSampler

_WARM_UP = 4


@dataclass(frozen=True)
class LoaderReport:
    """Images per second, medians over the rounds."""

    workers: int
    device: str
    image_bytes: float
    """Mean size of an encoded image."""
    bare_decoder: float
    """`cv2.imdecode` of images that lie in memory, in as many threads as there are workers."""
    loader: float
    """Ours: read, decoded, batched, on the device as uint8."""
    augmented: float
    """Ours with flip and normalization, on the device as float32."""
    usual_way: float
    """A torch DataLoader of as many workers, with PIL and per-sample transforms."""

    def as_json(self) -> dict[str, Any]:
        """Return the numbers and the two ratios that matter."""
        return asdict(self) | {
            "loader_per_bare": self.loader / self.bare_decoder,
            "augmented_per_bare": self.augmented / self.bare_decoder,
            "augmented_per_usual": self.augmented / self.usual_way,
        }


def measure_loader(
    folder: Path | None, *, workers: int, batch_size: int, seconds: float, rounds: int, device: torch.device
) -> LoaderReport:
    """Measure on a dataset, or on generated images. The ways take turns: a busy machine hits all alike."""
    with bench_source(folder) as source:
        numbers = np.random.default_rng(0).permutation(source.num_images)[:4096].tolist()
        images = [source.read(number) for number in numbers]
        ways: dict[str, Callable[[], float]] = {
            "bare_decoder": lambda: _bare(images, workers, seconds),
            "loader": lambda: _ours(source, workers, batch_size, seconds, device, None),
            "augmented": lambda: _ours(source, workers, batch_size, seconds, device, Augment(0)),
            "usual_way": lambda: _usual(source, workers, batch_size, seconds),
        }
        seen: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                seen[name].append(way())
    rates = {name: statistics.median(values) for name, values in seen.items()}
    mean_bytes = statistics.mean(len(picture) for picture in images)
    return LoaderReport(workers=workers, device=str(device), image_bytes=mean_bytes, **rates)


def _bare(images: list[bytes], threads: int, seconds: float) -> float:
    buffers = [np.frombuffer(picture, np.uint8) for picture in images]
    until = time.perf_counter() + seconds

    def decode(start: int) -> int:
        count = 0
        while time.perf_counter() < until:
            for buffer in buffers[start::threads]:
                cv2.imdecode(buffer, cv2.IMREAD_COLOR)
                count += 1
        return count

    cv2.setNumThreads(0)
    since = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(decode, range(threads))) / (time.perf_counter() - since)


def _ours(
    source: FaceDataset,
    workers: int,
    batch_size: int,
    seconds: float,
    device: torch.device,
    augment: Augment | None,
) -> float:
    order = GlobalSampler(source.num_images, seed=0, global_batch_size=batch_size)
    settings = LoaderSettings(local_batch_size=batch_size, workers=workers)
    loader = Loader(source, order, settings, rank=0, world_size=1, device=device)

    def use(batch: Any) -> int:
        (micro,) = batch
        if augment is not None:
            augment(micro.image_BHWC, micro.sample_B, micro.epoch)
        return batch_size

    try:
        return _rate(iter(loader), use, seconds, device)
    finally:
        loader.close()


def _usual(source: FaceDataset, workers: int, batch_size: int, seconds: float) -> float:
    loader: DataLoader[Any] = DataLoader(
        _PilDataset(source),
        batch_size,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=True,
    )

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    return _rate(forever(), lambda _: batch_size, seconds, torch.device("cpu"))


class _PilDataset(Dataset[Any]):
    """What the peers do to each sample."""

    def __init__(self, source: FaceDataset) -> None:
        from torchvision import transforms

        self._source = source
        self._transform = transforms.Compose(
            [
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
            ]
        )

    def __len__(self) -> int:
        return self._source.num_images

    def __getitem__(self, number: int) -> tuple[Any, int]:
        from PIL import Image

        image = Image.open(io.BytesIO(self._source.read(number))).convert("RGB")
        return self._transform(image), int(self._source.labels[number])


def _rate(batches: Iterator[Any], use: Callable[[Any], int], seconds: float, device: torch.device) -> float:
    for _ in range(_WARM_UP):
        use(next(batches))
    since, count = time.perf_counter(), 0
    while time.perf_counter() - since < seconds:
        count += use(next(batches))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return count / (time.perf_counter() - since)


@contextmanager
def bench_source(folder: Path | None, *, size: int = 112) -> Iterator[FaceDataset]:
    """Open a dataset, or 4096 generated images of 512 identities that are gone at the end."""
    if folder is not None:
        yield open_dataset(folder)
        return
    with tempfile.TemporaryDirectory() as scratch:
        _write_noise(Path(scratch), count=4096, size=size)
        yield open_dataset(Path(scratch))


def _write_noise(folder: Path, count: int, size: int) -> None:
    """Write JPEGs, at 112 × 112 of about 8 kB as a face of quality 95 has: a smooth image with fine noise."""
    random = np.random.default_rng(0)
    with RecordWriter(folder / "train.rec") as writer:
        for key in range(count):
            smooth = cv2.resize(random.integers(0, 256, (14, 14, 3), dtype=np.uint8), (size, size))
            noisy = np.clip(smooth + random.normal(0, 10, smooth.shape), 0, 255).astype(np.uint8)
            writer.write(key, RecordHeader.of_image(key // 8, key), encode_jpeg(noisy, 93))
