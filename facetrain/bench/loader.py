"""Image loader benchmark: images per second compared with the JPEG decoder alone.

All variants use the same number of cores and take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from facetrain.bench.generated_dataset import open_or_generate
from facetrain.bench.machine_peak import synchronize
from facetrain.bench.workloads import in_turn
from facetrain.data.dataset import FaceDataset
from facetrain.data.images.augment import Augment
from facetrain.data.loading.loader import Loader, LoaderSettings
from facetrain.data.loading.sampler import GlobalSampler, SampleOrder, sample_numbers
from facetrain.distributed.world import World

_DECODED_IMAGES = 4096


def measure_loader(
    folder: Path | None, *, workers: int, batch_size: int, seconds: float, rounds: int, device: torch.device
) -> dict[str, Any]:
    """Return the images per second of each variant on a dataset, or on generated images if `folder` is None.

    - `decoder`: `cv2.imdecode` of images in memory, in as many threads as there are workers: an upper bound.
    - `loader`: facetrain's loader: read, decoded and batched; on the device as uint8.
    - `loader_augmented`: facetrain's loader with flip and normalization; on the device as float32.

    Args:
        folder: dataset, in any format that `facetrain train` reads.
        workers: reading processes; threads of the decoder alone.
        batch_size: images per batch.
        seconds: duration of each variant in each round; longer for a loader that reads slowly.
        rounds: repetitions; the report has the medians.
        device: where the batches are needed.
    """
    with open_or_generate(folder) as source:
        # At random: neighbors in a dataset are of one person, and often of one size.
        numbers = sample_numbers(_DECODED_IMAGES, source.num_images)
        images = [source.read(number) for number in numbers.tolist()]
        timing = workers, batch_size, seconds, device
        rates = in_turn(
            {
                "decoder": lambda: _decoder_rate(images, workers, seconds),
                "loader": lambda: loader_rate(source, *timing, None),
                "loader_augmented": lambda: loader_rate(source, *timing, Augment(0)),
            },
            rounds,
        )
    speed = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "workers": workers,
        "device": str(device),
        "image_bytes": statistics.mean(len(image) for image in images),
        "images_per_s": speed,
        "loader_per_decoder": speed["loader"] / speed["decoder"],
        "augmented_per_decoder": speed["loader_augmented"] / speed["decoder"],
    }


def _decoder_rate(images: list[bytes], threads: int, seconds: float) -> float:
    buffers = [np.frombuffer(image, np.uint8) for image in images]
    until = time.perf_counter() + seconds

    def decode(start: int) -> int:
        count = 0
        while time.perf_counter() < until:
            for buffer in buffers[start::threads]:
                cv2.imdecode(buffer, cv2.IMREAD_COLOR)
                count += 1
        return count

    cv2.setNumThreads(0)  # The threads are ours: OpenCV's own would use cores that the other variants do not.
    since = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(decode, range(threads))) / (time.perf_counter() - since)


def loader_rate(
    source: FaceDataset,
    workers: int,
    batch_size: int,
    seconds: float,
    device: torch.device,
    augment: Augment | None,
) -> float:
    """Return the images per second of facetrain's loader."""
    order = GlobalSampler(source.num_images, SampleOrder(seed=0, global_batch_size=batch_size))
    settings = LoaderSettings(batch_size, workers=workers)
    loader = Loader(source, order, settings, World(0, 0, 1, 1, device))

    def use(batch: Any) -> None:
        (micro_batch,) = batch
        if augment is not None:
            augment(micro_batch.image_BHWC, micro_batch.draw_B, micro_batch.epoch)

    try:
        return images_per_second(iter(loader), use, loader.steps_ahead, batch_size, seconds, device)
    finally:
        loader.close()


def images_per_second(
    batches: Iterator[Any],
    use: Callable[[Any], None],
    ahead: int,
    batch_size: int,
    seconds: float,
    device: torch.device,
) -> float:
    """Return the images per second of an endless iterator that reads `ahead` batches ahead.

    These are not counted, and at least as many are: reading processes that begin together also finish together.
    """
    for _ in range(ahead):
        use(next(batches))
    synchronize(device)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or count < ahead:
        use(next(batches))
        count += 1
    synchronize(device)
    return count * batch_size / (time.perf_counter() - start)
