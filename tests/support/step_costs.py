"""Program that compares the cost of steps by taking them in turn.

It measures the CPU time of the process, which other programs change less than the time on the clock.

python -m tests.support.step_costs distillation 20      steps with each loss of a cached teacher against plain ones
python -m tests.support.step_costs heads 20             a group of two heads against one head with the same classes
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from facetrain.config.loading import build_config
from facetrain.data.images.augment import Augment
from facetrain.data.loading.loader import Batch
from facetrain.distributed.world import World
from facetrain.head.head_group import HeadGroup
from facetrain.run.build.head import build_teacher_centers
from facetrain.run.build.parts import build_state
from facetrain.run.build.step_schedule import schedule_steps
from facetrain.training.distillation import CENTER_LOSSES, LOSSES, Distillation
from facetrain.training.step import TrainStep
from facetrain.training.teacher_cache import CachedTeacher, new_cache
from tests.support.heads import make_head, margin_settings

WORLD = World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu"))
IMAGES, CLASSES, TEACHER = 20_000, 2_000, 512
BATCH, HEAD_BATCH, HEAD_CLASSES = 16, 128, 20_000


def in_turn(calls: dict[str, Callable[[int], None]], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each call in each round, after one round that does not count.

    Each round begins with another call, because the memory and the caches depend on the call before.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        first = number % len(calls)
        for name in [*calls][first:] + [*calls][:first]:
            begin = time.process_time()
            calls[name](number)
            if number:
                seconds[name].append(time.process_time() - begin)
    return seconds


def report(seconds: dict[str, list[float]]) -> None:
    """Print the medians, and those of the ratios to the first call in the same round."""
    plain = next(iter(seconds.values()))
    for name, values in seconds.items():
        ratio = median(value / base for value, base in zip(values, plain, strict=True))
        print(f"{name:18}{1000 * median(values):10.2f} ms{ratio:8.3f}")


def distillation(rounds: int) -> None:
    values = {
        "data": {"train": "noise"},
        "model": {"backbone": "mbf_small", "embedding_size": 128},
        "train": {"batch_size": BATCH, "precision": "fp32"},
    }
    config = build_config(values, "step_costs")
    schedule = schedule_steps(config, IMAGES, 1)
    state = build_state(config, WORLD, CLASSES, schedule, Path("unused"), None)  # type: ignore[arg-type]
    augment = Augment(0, config.data.augment)
    step = TrainStep(state.network, augment, max_skipped_steps=1 << 30)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "teacher.safetensors"
        with new_cache(path, (IMAGES, 2, TEACHER), dataset="", teacher="") as rows:
            rows[:] = torch.randn(rows.shape)
        teacher = CachedTeacher(
            path, dataset="", teacher="", num_images=IMAGES, flips=augment.flips, needs_mirrored=True
        )

        def take(loss: str) -> Callable[[int], None]:
            taught: Distillation | None = None
            if loss != "plain":
                centers = None
                if loss in CENTER_LOSSES:
                    centers = build_teacher_centers(
                        config, WORLD, CLASSES, Path("unused"), embedding_size=TEACHER, schedule=schedule
                    )
                taught = Distillation(
                    teacher,
                    loss,
                    weight=1.0,
                    embedding_size=config.model.embedding_size,
                    seed=0,
                    centers=centers,
                )

            def one(number: int) -> None:
                generator = torch.Generator().manual_seed(number)
                image = torch.randint(256, (BATCH, 112, 112, 3), dtype=torch.uint8, generator=generator)
                label = torch.randint(CLASSES, (BATCH,), generator=generator)
                sample = torch.randint(IMAGES, (BATCH,), generator=generator)
                state.distillation = taught
                step(state, (Batch(0, 0, image, label, sample),))

            return one

        report(in_turn({loss: take(loss) for loss in ("plain", *LOSSES, *CENTER_LOSSES)}, rounds))


def heads(rounds: int) -> None:
    for rate in (1.0, 0.1):
        options = {"embedding_size": 512, "margin": margin_settings(), "sample_rate": rate}
        one = make_head(num_classes=HEAD_CLASSES, **options)
        two = HeadGroup(
            [make_head(num_classes=HEAD_CLASSES // 2, **options) for _ in range(2)], (1.0, 1.0), (0.5, 0.5)
        )

        def take(head: Callable[[Tensor, Tensor], Tensor]) -> Callable[[int], None]:
            def step(number: int) -> None:
                embedding = torch.randn(HEAD_BATCH, 512, requires_grad=True)
                label = torch.randint(HEAD_CLASSES, (HEAD_BATCH,))
                head.begin_step(number, lr=0.01)  # type: ignore[attr-defined]
                head(embedding, label).backward()

            return step

        print(f"sample rate {rate}")
        report(in_turn({"one head": take(one), "group of 2": take(two)}, rounds))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    {"distillation": distillation, "heads": heads}[sys.argv[1]](int(sys.argv[2]))
