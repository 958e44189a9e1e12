"""Images per second of facetrain's loader, beside torch's DataLoader with OpenCV on the same number of cores."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from benchmarks.common import run
from facetrain.bench.generated_dataset import open_or_generate
from facetrain.bench.loader import images_per_second, loader_rate
from facetrain.bench.workloads import in_turn
from facetrain.cpu_cores import usable_cores
from facetrain.data.dataset import FaceDataset
from facetrain.data.images.augment import Augment

_ENDLESS = 1 << 40


def measure_dataloader(
    data: Path | None = None,
    batch_size: int = 128,
    seconds: float = 3.0,
    rounds: int = 3,
    device: str = "cpu",
) -> dict[str, float]:
    """Return the medians of both loaders, which flip and normalize, and their ratio.

    The DataLoader decodes and flips in its workers, sends uint8, and normalizes on the device.
    """
    with open_or_generate(data) as source:
        timing = usable_cores(), batch_size, seconds, torch.device(device)
        rates = in_turn(
            {
                "loader_augmented": lambda: loader_rate(source, *timing, Augment(0)),
                "dataloader_cv2": lambda: _dataloader_rate(_OpenCvDataset(source), *timing),
            },
            rounds,
        )
    speed = {name: statistics.median(values) for name, values in rates.items()}
    return speed | {"augmented_per_dataloader_cv2": speed["loader_augmented"] / speed["dataloader_cv2"]}


def _dataloader_rate(
    dataset: _OpenCvDataset, workers: int, batch_size: int, seconds: float, device: torch.device
) -> float:
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size,
        # Without end: at each end of a short epoch the workers would have nothing to do.
        sampler=RandomSampler(dataset, num_samples=_ENDLESS),
        num_workers=workers,
        drop_last=True,
        pin_memory=device.type == "cuda",
        worker_init_fn=_use_one_thread,
    )

    def use(batch: Any) -> None:
        image = batch[0].to(device, non_blocking=True)
        image.permute(0, 3, 1, 2).float().sub_(127.5).mul_(1 / 127.5)

    ahead = 2 * workers  # of the DataLoader, by default
    return images_per_second(iter(loader), use, ahead, batch_size, seconds, device)


def _use_one_thread(_worker: int) -> None:
    cv2.setNumThreads(0)


class _OpenCvDataset(Dataset[tuple[Tensor, int]]):
    """Samples as a fast script makes them: decoded by OpenCV, flipped at random, sent as uint8."""

    def __init__(self, source: FaceDataset) -> None:
        self._source = source

    def __len__(self) -> int:
        return self._source.num_images

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        image = cv2.imdecode(np.frombuffer(self._source.read(number), np.uint8), cv2.IMREAD_COLOR)
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        if torch.rand(()) < 0.5:
            image = cv2.flip(image, 1)
        return torch.from_numpy(image), int(self._source.labels[number])


if __name__ == "__main__":
    run(measure_dataloader)
