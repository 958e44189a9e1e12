"""Program that trains two steps, and prints the peak of the process's memory and the forecast, in bytes.

    python -m tests.support.measure_memory '{"model": {"backbone": "r18"}, "train": {"batch_size": 32}}' 10000

Set the variables EXACT in its environment: glibc then returns freed blocks at once, so the peak is of memory in use.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from facetrain.config.loading import build_config
from facetrain.config.schema import Config
from facetrain.data.augmentations.build import build_augment
from facetrain.data.loading.loader import Batch
from facetrain.distributed.world import World
from facetrain.plan.forecast import forecast
from facetrain.run.parts.state import build_state
from facetrain.run.parts.step_schedule import schedule_steps
from facetrain.training.step import TrainStep

EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
WORLD = World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu"))
SMALL = {"backbone": "iresnet", "layers": [1] * 4, "widths": [16] * 4, "embedding_size": 32}


def resident_bytes(which: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of this process."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def describe(values: dict[str, Any]) -> Config:
    return build_config({"data": {"train": "noise"}, "optim": {"lr": 1e-6}} | values, "measure_memory")


def train(config: Config, classes: int) -> None:
    """Take two steps on one random batch."""
    schedule, side = schedule_steps(config, 1 << 40, 1), config.data.image_size
    count = schedule.local_batch_size
    # Images are for merged norms of weights to start from, of which there are none.
    state = build_state(config, WORLD, classes, schedule, Path("unused"), None)
    step = TrainStep(
        state.network, build_augment(0, config.data.augment), max_skipped_steps=schedule.total_steps
    )
    image = torch.randint(256, (count, side, side, 3), dtype=torch.uint8)
    batch = Batch(0, 0, image, torch.randint(classes, (count,)), torch.arange(count))
    for _ in range(2):
        step(state, (batch,))
        state.step += 1


def main(values: dict[str, Any], classes: int) -> None:
    config = describe(values)
    # Libraries that a first step loads are loaded by a small one.
    train(
        describe(
            values
            | {
                "model": SMALL,
                "train": values.get("train", {}) | {"batch_size": 4},
                "data": {"train": "noise", "image_size": 32},
            }
        ),
        100,
    )
    before = resident_bytes("VmRSS")
    train(config, classes)
    needed = resident_bytes("VmHWM") - before
    parts = forecast(config, classes, 1, cuda=False).parts
    # Nothing is verified or saved, and the memory of the program itself was there before.
    not_measured = ("verification", "saving", "runtime")
    print(
        json.dumps(
            {"measured": needed, "forecast": sum(parts.values()) - sum(parts[n] for n in not_measured)}
        )
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
