"""Jobs of a GPU session, in the order of their value: a session may end before the last one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

GROUPS = {
    "self-test": "The kernels' own check",
    "kernels": "Kernels compared with float64",
    "steps": "Whole training steps compared with arcface_torch's recipe",
    "head": "Steps of the head",
    "backbone": "Training steps of the backbone, without a head",
    "memory": "Peak of memory compared with `facetrain plan`",
    "loader": "Images per second of the loader",
    "limit": "The largest number of identities that fits",
    "run": "A whole run",
    "tests": "Tests on the device (`tests/gpu`)",
}
"""Groups of jobs in the order of their value, with the titles of their tables."""
_TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """Measurement that runs in its own process."""

    name: str
    group: str
    seconds: int
    """Time after which it is stopped."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the function for its group in `measure`."""
    interpreted: bool = False
    """Without a GPU, Triton's interpreter runs its kernels."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements: those for a GPU, or tiny ones for a rehearsal on a CPU."""

    backbones: tuple[str, ...] = ("r50", "r100", "r18", "mbf", "vit_b")
    batches: tuple[int, ...] = (128, 256, 512)
    image_size: int = 112
    identities: tuple[int, ...] = (2_000_000, 100_000, 1_000_000, 10_000_000)
    step_backbones: tuple[str, ...] = ("r100", "r50")
    step_identities: tuple[int, ...] = (360_232, 2_059_906)
    step_batches: tuple[int, ...] = (128, 256)
    gpus: tuple[int, ...] = (1, 2, 4, 8)
    head_batch: int = 1024
    steps: int = 20
    rounds: int = 3
    run_steps: int = 1200
    loader_seconds: float = 5.0

    def config(self, backbone: str, batch: int, **changes: Any) -> dict[str, Any]:
        """Return keys of a config and their values."""
        keys = {"model.backbone": backbone, "train.batch_size": batch, "data.image_size": self.image_size}
        return keys | {name.replace("__", "."): value for name, value in changes.items()}


ON_GPU = Sizes()
REHEARSAL = Sizes(
    backbones=("r18",),
    batches=(2,),
    image_size=16,
    identities=(2000,),
    step_backbones=("r18",),
    step_identities=(5000,),
    step_batches=(2,),
    gpus=(1,),
    head_batch=16,
    steps=1,
    rounds=1,
    run_steps=4,
    loader_seconds=0.2,
)


def list_jobs(checkout: Path, *, cpu: bool = False) -> list[Job]:
    """Return the jobs for a checkout of the repository; `cpu`: a rehearsal without a GPU."""
    sizes, device = (REHEARSAL, "cpu") if cpu else (ON_GPU, "cuda")
    jobs = [*_kernels(), *_steps(sizes), *_heads(sizes), *_backbones(sizes), *_memory(sizes)]
    jobs += [*_others(sizes), *_tests(checkout)]
    return [replace(job, options={**job.options, "device": device}) for job in jobs]


def _kernels() -> Iterator[Job]:
    for precision in ("bf16", "fp16"):
        name = f"self-test {precision}"
        yield Job(name, "self-test", 300, {"precision": precision}, interpreted=True)
    yield Job("kernels", "kernels", 300, {"module": "tests.support.interpret_kernels"}, interpreted=True)


def _steps(sizes: Sizes) -> Iterator[Job]:
    turns = {"steps": sizes.steps, "rounds": sizes.rounds}
    for gpus, batch, backbone, identities in itertools.product(
        sizes.gpus, sizes.step_batches, sizes.step_backbones, sizes.step_identities
    ):
        config = sizes.config(backbone, batch, train__precision="bf16")
        options = {"config": config, "identities": identities, "gpus": gpus, "turns": turns}
        yield Job(f"steps {gpus} x {backbone} {batch} {identities}", "steps", 300, options)


def _heads(sizes: Sizes) -> Iterator[Job]:
    for identities, precision in itertools.product(sizes.identities, ("bf16", "fp16")):
        options = {
            "identities": identities, "precision": precision, "batch": sizes.head_batch, "steps": sizes.steps
        }  # fmt: skip
        yield Job(f"head {identities} {precision}", "head", 240, options)


def _backbones(sizes: Sizes) -> Iterator[Job]:
    turns = {"steps": sizes.steps, "rounds": sizes.rounds}
    for batch, name in itertools.product(sizes.batches, sizes.backbones):
        options = {"name": name, "batch": batch, "image_size": sizes.image_size, "turns": turns}
        yield Job(f"backbone {name} {batch}", "backbone", 420, options)


def _memory(sizes: Sizes) -> Iterator[Job]:
    changes: tuple[dict[str, Any], ...] = ({}, {"model__checkpoint_activations": True})
    for backbone, change in itertools.product(sizes.step_backbones, changes):
        config = sizes.config(backbone, sizes.step_batches[-1], **change)
        label = " ".join(f"{key}={value}" for key, value in change.items()).replace("__", ".") or "defaults"
        options = {"config": config, "identities": sizes.step_identities[0]}
        yield Job(f"memory {backbone} {label}", "memory", 180, options)


def _others(sizes: Sizes) -> Iterator[Job]:
    batch = sizes.step_batches[-1]
    options = {"batch": max(batch, 32), "seconds": sizes.loader_seconds}
    yield Job("loader", "loader", 240, options)
    config = sizes.config(sizes.step_backbones[0], batch)
    yield Job("limit identities", "limit", 480, {"config": config})
    yield Job(
        "run", "run", 480, {"config": sizes.config("r50", sizes.step_batches[0]), "steps": sizes.run_steps}
    )


def _tests(checkout: Path) -> Iterator[Job]:
    for path in sorted((checkout / "tests" / "gpu").glob("test_*.py")):
        for name in _TEST.findall(path.read_text(encoding="utf-8")):
            test = f"tests/gpu/{path.name}::{name}"
            yield Job(test, "tests", 500, {"test": test})
