"""Jobs of a GPU session, in the order of what they decide: a session may end before the last one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

GROUPS = {
    "rates": "The machine: products and copies",
    "self-test": "The kernels' own check, as a run does it",
    "oracle": "The head compared with float64",
    "sync": "A step in which the host must not wait for the GPU",
    "steps": "Whole training steps compared with arcface_torch's recipe",
    "run": "A run that is stopped and resumed",
    "head": "Steps of the head",
    "backbone": "Training steps of the backbone, without a head",
    "tests": "Tests on the device (`tests/gpu`)",
    "kernels": "Each kernel compared with float64",
    "memory": "Peak of memory compared with `facetrain plan`",
    "loader": "Images per second of the loader",
    "limit": "The largest number of identities that fits",
}
"""Groups of jobs in their order, with the titles of their tables."""
SESSION_S = 40 * 60
"""Time for the jobs without `--all` on one GPU."""
_TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)
_FOR_TWO_GPUS = "test_two_gpus.py"
_TEST_S = 30
_SLOW_TESTS = {
    "test_a_compiled_run_has_the_losses_of_an_eager_run": 180,
    "test_a_deterministic_run_resumes_bit_for_bit": 240,
    "test_losses_in_16_bits_are_near_those_in_32": 90,
    "test_losses_are_those_of_the_cpu": 60,
    "test_a_resumed_run_goes_on_as_one_that_was_not_interrupted": 60,
    "test_two_gpus_lose_what_one_does": 240,
    "test_two_gpus_with_replayed_code_have_the_losses_of_two_without": 240,
    "test_a_killed_rank_is_named_and_the_others_end_within_30_s": 120,
}
"""Expected seconds of tests that compile, or start a run for each of many cases."""
_EAGER = ("facetrain", "facetrain_in_ddp")
"""Variants of a backbone's step: alone, and in DDP of one rank, whose cost is that of copying the gradients."""
_PATIENCE, _PATIENCE_WITH_A_CPU = 3, 15
"""A job is stopped after this many times its expected time, which is that on a GPU."""


@dataclass(frozen=True)
class Job:
    """Measurement that runs in its own process."""

    name: str
    group: str
    seconds: int
    """Time that it is expected to take."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the function for its group in `measure`."""
    interpreted: bool = False
    """Without a GPU, Triton's interpreter runs its kernels."""

    @property
    def limit(self) -> int:
        """Seconds after which it is stopped."""
        return (_PATIENCE_WITH_A_CPU if self.options.get("device") == "cpu" else _PATIENCE) * self.seconds


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements: those for a GPU, or tiny ones for a rehearsal on a CPU."""

    precision: str = "bf16"
    """Of whole steps and runs, and of the fastest product beside fp32."""
    image_size: int = 112
    batch: int = 128
    first_backbone: str = "r100"
    second_backbone: str = "r50"
    more_backbones: tuple[str, ...] = ("r18", "mbf", "vit_b")
    more_batches: tuple[int, ...] = (256, 512)
    shards: tuple[int, ...] = (45_029, 65_536)
    """Classes of one of 8 ranks: of Glint360K, which is odd, and a power of two."""
    identities: tuple[int, ...] = (2_000_000, 10_000_000)
    more_identities: tuple[int, ...] = (100_000, 1_000_000)
    step_identities: tuple[int, ...] = (360_232, 2_059_906)
    head_batch: int = 1024
    embedding_size: int = 512
    executions: tuple[tuple[str, ...], ...] = (_EAGER, ("facetrain_compiled",))
    """Variants of a backbone's step, by jobs: to compile a deep network takes minutes."""
    more_executions: tuple[tuple[str, ...], ...] = (("facetrain_replayed",), ("facetrain_compiled_in_ddp",))
    steps: int = 20
    rounds: int = 3
    run_steps: int = 300
    stopped_after: int = 60
    loader_seconds: float = 5.0

    def config(self, backbone: str, batch: int) -> dict[str, Any]:
        """Return keys of a config and their values."""
        return {
            "model.backbone": backbone, "train.batch_size": batch, "train.precision": self.precision,
            "data.image_size": self.image_size,
        }  # fmt: skip

    @property
    def turns(self) -> dict[str, int]:
        """Steps of a turn, and turns."""
        return {"steps": self.steps, "rounds": self.rounds}


ON_GPU = Sizes()
REHEARSAL = Sizes(
    precision="fp32",  # a CPU may multiply bfloat16 thirty times slower
    image_size=16,
    batch=2,
    first_backbone="r18",
    second_backbone="mbf",
    more_backbones=(),
    more_batches=(),
    shards=(101, 128),
    identities=(2000,),
    more_identities=(),
    step_identities=(5000,),
    executions=(_EAGER,),
    more_executions=(),
    head_batch=16,
    embedding_size=16,
    steps=1,
    rounds=1,
    run_steps=12,
    stopped_after=4,
    loader_seconds=0.2,
)


def list_jobs(checkout: Path, *, gpus: int, everything: bool = False) -> list[Job]:
    """Return the jobs for a checkout of the repository on a machine with so many GPUs; 0: a rehearsal.

    Those for more GPUs than there are, and without `everything` those that decide less, are left out.
    """
    sizes, device = (ON_GPU, "cuda") if gpus else (REHEARSAL, "cpu")
    jobs = [*_deciding(sizes), *_tests(checkout, gpus)]
    if everything:
        jobs += [*_several_gpus(sizes, gpus), *_others(sizes)]
    return [replace(job, options={**job.options, "device": device}) for job in jobs]


def _deciding(sizes: Sizes) -> Iterator[Job]:
    yield Job("rates", "rates", 20, {"precisions": sorted({sizes.precision, "fp32"})})
    head = {"embeddings": sizes.head_batch, "embedding_size": sizes.embedding_size}
    yield Job("self-test", "self-test", 60, {"chunk": sizes.shards[-1], **head}, interpreted=True)
    for classes in sizes.shards:
        yield Job(f"oracle {classes}", "oracle", 40, {"classes": classes, **head}, interpreted=True)
    config = sizes.config(sizes.second_backbone, sizes.batch)
    yield Job("sync", "sync", 60, {"config": config, "identities": sizes.step_identities[0]})
    yield _steps(sizes, sizes.first_backbone, sizes.batch, sizes.step_identities[0], 1)
    run = {"config": config, "steps": sizes.run_steps, "stopped_after": sizes.stopped_after}
    yield Job("run", "run", 180, run)
    for identities in sizes.identities:
        yield _head(sizes, identities, "bf16")
    for variants, name in product(sizes.executions, (sizes.first_backbone, sizes.second_backbone)):
        yield _backbone(sizes, name, sizes.batch, variants)


def _backbone(sizes: Sizes, name: str, batch: int, variants: tuple[str, ...]) -> Job:
    options = {
        "name": name, "batch": batch, "image_size": sizes.image_size, "turns": sizes.turns,
        "variants": list(variants),
    }  # fmt: skip
    label = " ".join(variants).replace("facetrain_", "")
    return Job(f"backbone {name} {batch} {label}", "backbone", 60 if variants == _EAGER else 200, options)


def _steps(sizes: Sizes, backbone: str, batch: int, identities: int, gpus: int) -> Job:
    options = {
        "config": sizes.config(backbone, batch), "identities": identities, "gpus": gpus, "turns": sizes.turns
    }  # fmt: skip
    return Job(f"steps {gpus} x {backbone} {batch} {identities}", "steps", 150, options)


def _head(sizes: Sizes, identities: int, precision: str) -> Job:
    options = {
        "identities": identities, "precision": precision, "batch": sizes.head_batch, "steps": sizes.steps
    }  # fmt: skip
    return Job(f"head {identities} {precision}", "head", 60, options)


def _tests(checkout: Path, gpus: int) -> Iterator[Job]:
    for path in sorted((checkout / "tests" / "gpu").glob("test_*.py")):
        if gpus < 2 and path.name == _FOR_TWO_GPUS:
            continue
        for name in _TEST.findall(path.read_text(encoding="utf-8")):
            test = f"tests/gpu/{path.name}::{name}"
            yield Job(test, "tests", _SLOW_TESTS.get(name, _TEST_S), {"test": test})


def _several_gpus(sizes: Sizes, gpus: int) -> Iterator[Job]:
    backbones, batches = (sizes.first_backbone, sizes.second_backbone), (sizes.batch, *sizes.more_batches[:1])
    counts = [count for count in (1, 2, 4, 8) if count <= max(gpus, 1)]
    first = _steps(sizes, sizes.first_backbone, sizes.batch, sizes.step_identities[0], 1)
    for count, batch, backbone, identities in product(counts, batches, backbones, sizes.step_identities):
        if (job := _steps(sizes, backbone, batch, identities, count)) != first:
            yield job


def _others(sizes: Sizes) -> Iterator[Job]:
    yield Job("kernels", "kernels", 120, {"module": "tests.support.interpret_kernels"}, interpreted=True)
    for identities, precision in product(sizes.more_identities + sizes.identities, ("bf16", "fp16")):
        if precision == "fp16" or identities in sizes.more_identities:
            yield _head(sizes, identities, precision)
    names = (sizes.first_backbone, sizes.second_backbone, *sizes.more_backbones)
    for batch, name in product((sizes.batch, *sizes.more_batches), names):
        if batch != sizes.batch or name in sizes.more_backbones:
            for variants in sizes.executions:
                yield _backbone(sizes, name, batch, variants)
        for variants in sizes.more_executions:
            yield _backbone(sizes, name, batch, variants)
    batch = (sizes.batch, *sizes.more_batches)[-1]
    changes: tuple[dict[str, Any], ...] = ({}, {"model.checkpoint_activations": True})
    for backbone, change in product((sizes.first_backbone, sizes.second_backbone), changes):
        label = " ".join(f"{key}={value}" for key, value in change.items()) or "defaults"
        options = {"config": sizes.config(backbone, batch) | change, "identities": sizes.step_identities[0]}
        yield Job(f"memory {backbone} {label}", "memory", 60, options)
    yield Job("loader", "loader", 60, {"batch": max(batch, 32), "seconds": sizes.loader_seconds})
    yield Job("limit identities", "limit", 160, {"config": sizes.config(sizes.first_backbone, batch)})
