"""Jobs of a GPU session, in the order of their value: a session may end before the last one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GROUPS = {
    "tests": "Tests on the device (`tests/gpu`)",
    "kernels": "Kernels compared with float64",
    "backbone": "Training steps of the backbone, without a head",
    "head": "Steps of the head",
    "steps": "Whole training steps compared with arcface_torch's recipe",
    "memory": "Peak of memory compared with `facetrain plan`",
    "loader": "Images per second of the loader",
    "limit": "The largest number of identities that fits",
}
"""Groups of jobs, with the titles of their tables."""
_KERNEL_TESTS = ("interpret_kernels", "interpret_fused_iresnet")


@dataclass(frozen=True)
class Job:
    """One measurement, which runs in a process of its own."""

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

    backbones: tuple[str, ...]
    batches: tuple[int, ...]
    image_size: int
    identities: tuple[int, ...]
    step_backbones: tuple[str, ...]
    step_identities: tuple[int, ...]
    step_batch: int
    head_batch: int
    steps: int
    rounds: int
    loader_seconds: float


ON_GPU = Sizes(
    backbones=("r50", "r100", "r18", "mbf", "vit_b"),
    batches=(256, 128, 512),
    image_size=112,
    identities=(2_000_000, 100_000, 1_000_000, 10_000_000),
    step_backbones=("r50", "r100"),
    step_identities=(360_232, 2_059_906),
    step_batch=256,
    head_batch=1024,
    steps=20,
    rounds=3,
    loader_seconds=5.0,
)
REHEARSAL = Sizes(
    backbones=("r18",),
    batches=(2,),
    image_size=16,
    identities=(2000,),
    step_backbones=("r18",),
    step_identities=(5000,),
    step_batch=2,
    head_batch=16,
    steps=1,
    rounds=1,
    loader_seconds=0.2,
)


def list_jobs(checkout: Path, *, cpu: bool = False) -> list[Job]:
    """Return the jobs for a checkout of the repository; `cpu`: a rehearsal without a GPU."""
    sizes = REHEARSAL if cpu else ON_GPU
    device = "cpu" if cpu else "cuda"
    jobs = [*_tests(checkout), *_kernels(), *_backbones(sizes), *_heads(sizes), *_steps(sizes)]
    jobs += [*_memory(sizes), *_loader(sizes), *_limit(sizes)]
    return [Job(j.name, j.group, j.seconds, {**j.options, "device": device}, j.interpreted) for j in jobs]


def _tests(checkout: Path) -> Iterator[Job]:
    for path in sorted((checkout / "tests" / "gpu").glob("test_*.py")):
        yield Job(f"tests/gpu/{path.name}", "tests", 500, {"path": f"tests/gpu/{path.name}"})


def _kernels() -> Iterator[Job]:
    for module in _KERNEL_TESTS:
        yield Job(
            f"kernels {module}", "kernels", 300, {"module": f"tests.support.{module}"}, interpreted=True
        )


def _backbones(sizes: Sizes) -> Iterator[Job]:
    for batch in sizes.batches:
        for name in sizes.backbones:
            options = {
                "name": name, "batch": batch, "image_size": sizes.image_size,
                "steps": sizes.steps, "rounds": sizes.rounds,
            }  # fmt: skip
            yield Job(f"backbone {name} {batch}", "backbone", 420, options)


def _heads(sizes: Sizes) -> Iterator[Job]:
    for identities in sizes.identities:
        for precision in ("bf16", "fp16"):
            options = {
                "identities": identities, "precision": precision, "batch": sizes.head_batch, "steps": sizes.steps
            }  # fmt: skip
            yield Job(f"head {identities} {precision}", "head", 240, options)


def _steps(sizes: Sizes) -> Iterator[Job]:
    for backbone in sizes.step_backbones:
        for identities in sizes.step_identities:
            for precision in ("bf16", "fp16"):
                options = {
                    "backbone": backbone, "identities": identities, "precision": precision, "batch": sizes.step_batch,
                    "image_size": sizes.image_size, "steps": sizes.steps, "rounds": sizes.rounds,
                }  # fmt: skip
                yield Job(f"steps {backbone} {identities} {precision}", "steps", 300, options)


def _memory(sizes: Sizes) -> Iterator[Job]:
    identities = sizes.step_identities[0]
    for backbone in sizes.step_backbones:
        for change in ({}, {"train.fused": "off"}, {"model.checkpoint_activations": True}):
            options = {
                "backbone": backbone, "identities": identities, "batch": sizes.step_batch,
                "image_size": sizes.image_size, "change": change,
            }  # fmt: skip
            label = " ".join(f"{key}={value}" for key, value in change.items()) or "defaults"
            yield Job(f"memory {backbone} {label}", "memory", 180, options)


def _loader(sizes: Sizes) -> Iterator[Job]:
    for decode in ("cpu", "gpu"):
        options = {"decode": decode, "batch": max(sizes.step_batch, 32), "seconds": sizes.loader_seconds}
        yield Job(f"loader {decode}", "loader", 240, options)


def _limit(sizes: Sizes) -> Iterator[Job]:
    options = {"backbone": sizes.step_backbones[0], "batch": sizes.step_batch, "image_size": sizes.image_size}
    yield Job("limit identities", "limit", 480, options)
