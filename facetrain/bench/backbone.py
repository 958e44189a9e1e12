"""The backbone's training step, from plain float32 to ours: each way in a process of its own, all in turn.

A step is forward, backward and update by SGD with momentum; there is no head, and the images lie on the device.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from facetrain.backbone.prelu import use_torchs_backward
from facetrain.backbone.zoo import build_backbone
from facetrain.bench.machine import wait_for
from facetrain.distributed.process_setup import keep_freed_memory
from facetrain.errors import RunError
from facetrain.telemetry.memory import peak_gib
from facetrain.train.precision import InPrecision, memory_format_for

_WARM_UP = 3


@dataclass(frozen=True)
class Way:
    """How a step is computed."""

    precision: str
    channels_last: bool = False
    ours: bool = False
    """With the fused optimizer and, on the CPU, with our allocator's settings and PReLU's other backward pass."""
    compile: bool = False


WAYS = {
    "plain": Way("fp32"),
    "bf16": Way("bf16"),
    "channels_last": Way("bf16", channels_last=True),
    "ours": Way("bf16", channels_last=True, ours=True),
    "ours_compiled": Way("bf16", channels_last=True, ours=True, compile=True),
}
PLAIN = "plain"
"""What the others are compared with: what PyTorch does where nothing is asked for."""


@dataclass(frozen=True)
class Subject:
    """What is trained."""

    backbone: str
    batch: int
    image_size: int
    device: str
    threads: int


def measure_backbones(subject: Subject, ways: Sequence[str], *, steps: int, rounds: int) -> dict[str, Any]:
    """Take `steps` steps of each way in each of `rounds` rounds; return the medians and their ratios to `plain`.

    Raises:
        RunError: a way's process ended before it answered: for lack of memory, say.
    """
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    with _served(subject, ways) as answers:
        first = {name: answer(1)[0] for name, answer in answers.items()}
        for answer in answers.values():
            answer(_WARM_UP)
        for _ in range(rounds):  # in turn: a busy machine hits all alike
            for name, answer in answers.items():
                speeds[name].append(steps * subject.batch / answer(steps)[0])
        peaks = {name: answer(0)[1] for name, answer in answers.items()}
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    return {
        "torch": torch.__version__,
        **vars(subject),
        "ways": {
            name: {
                "images_per_s": median,
                "rounds": speeds[name],
                "times_plain": median / medians[PLAIN] if PLAIN in medians else None,
                "first_step_s": first[name],
                "peak_gib": peaks[name],
            }
            for name, median in medians.items()
        },
    }


@contextmanager
def _served(
    subject: Subject, ways: Sequence[str]
) -> Iterator[dict[str, Callable[[int], tuple[float, float]]]]:
    """Start a process for each way; yield what takes steps there and returns (seconds, peak in GiB so far)."""
    context = multiprocessing.get_context("spawn")
    pipes = {name: context.Pipe() for name in ways}
    processes = [
        context.Process(target=_serve, args=(there, subject, WAYS[name]), daemon=True)
        for name, (_, there) in pipes.items()
    ]
    for process, (_, there) in zip(processes, pipes.values(), strict=True):
        process.start()
        there.close()
    try:
        yield {name: _asking(here, name) for name, (here, _) in pipes.items()}
    finally:
        for here, _ in pipes.values():
            here.close()  # at which they end
        for process in processes:
            process.join()


def _asking(pipe: Connection, name: str) -> Callable[[int], tuple[float, float]]:
    def ask(steps: int) -> tuple[float, float]:
        try:
            pipe.send(steps)
            seconds, peak = pipe.recv()
        except (EOFError, OSError) as error:
            raise RunError(
                f"bench backbone: the process of {name} ended early; take a smaller --batch-size if memory is short"
            ) from error
        return seconds, peak

    return ask


def _serve(pipe: Connection, subject: Subject, way: Way) -> None:
    torch.set_num_threads(subject.threads)
    device = torch.device(subject.device)
    if way.ours and device.type == "cpu":
        keep_freed_memory()
    step = _build_step(subject, way, device)
    while True:
        try:
            steps = pipe.recv()
        except EOFError:
            return
        wait_for(device)
        since = time.perf_counter()
        for _ in range(steps):
            step()
        wait_for(device)
        pipe.send((time.perf_counter() - since, peak_gib(device)))


def _build_step(subject: Subject, way: Way, device: torch.device) -> Callable[[], None]:
    torch.manual_seed(0)
    backbone = build_backbone(subject.backbone, image_size=subject.image_size)
    if not way.ours:
        use_torchs_backward(backbone)
    memory_format = memory_format_for(backbone, device, channels_last=way.channels_last)
    backbone = backbone.to(device, memory_format=memory_format)  # type: ignore[call-overload]
    network = InPrecision(backbone, way.precision, device, memory_format=memory_format, compile=way.compile)
    optimizer = torch.optim.SGD(
        [parameter for parameter in backbone.parameters() if parameter.requires_grad],
        lr=1e-6,
        momentum=0.9,
        weight_decay=5e-4,
        fused=True if way.ours else None,
    )
    image_BCHW = torch.randn(subject.batch, 3, subject.image_size, subject.image_size, device=device)

    def step() -> None:
        network(image_BCHW).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
