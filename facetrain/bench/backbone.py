"""Backbone benchmark: training steps from PyTorch's defaults to facetrain's settings.

A step is the forward pass, the backward pass and the update by SGD with momentum; there is no head, and the
images are on the device. Each variant runs in its own process, because allocator settings hold for a whole
process; the processes take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from facetrain.backbone.prelu import use_torch_backward
from facetrain.backbone.registry import IRESNET_LAYERS
from facetrain.backbone.zoo import build_backbone
from facetrain.bench.machine_peak import synchronize
from facetrain.bench.workloads import BackboneWorkload, Turns
from facetrain.cpu_cores import usable_cores
from facetrain.distributed.process_setup import keep_freed_memory
from facetrain.distributed.spawn import HelperContext
from facetrain.errors import RunError, UsageError
from facetrain.telemetry.memory import peak_gib
from facetrain.training.fused_trunk import choose_trunk
from facetrain.training.precision import InPrecision, memory_format_for
from facetrain.training.settings import TrainSettings

_WARM_UP_STEPS = 3
_LR = 1e-6
"""Small enough that the weights hardly change: the loss has no labels to learn from."""


@dataclass(frozen=True)
class BackboneVariant:
    """Settings of a training step."""

    train: TrainSettings
    """Section `train` of the config: precision, memory layout, compiler, fused kernels."""
    facetrain: bool = True
    """Use the fused optimizer and, on the CPU, facetrain's allocator settings and PReLU backward pass."""


_BF16 = TrainSettings(precision="bf16")
VARIANTS = {
    "plain": BackboneVariant(TrainSettings(precision="fp32", channels_last=False), facetrain=False),
    "bf16": BackboneVariant(TrainSettings(precision="bf16", channels_last=False), facetrain=False),
    "channels_last": BackboneVariant(_BF16, facetrain=False),
    "facetrain": BackboneVariant(_BF16),
    "facetrain_compiled": BackboneVariant(TrainSettings(precision="bf16", compile="on")),
    "facetrain_fused": BackboneVariant(TrainSettings(precision="bf16", fused="on")),
    "facetrain_replayed": BackboneVariant(TrainSettings(precision="bf16", compile="reduce-overhead")),
}
ON_EVERY_DEVICE = ["plain", "bf16", "channels_last", "facetrain", "facetrain_compiled"]
"""Variants for all networks and devices. Fused kernels need a GPU and an IResNet, replayed code needs a GPU."""
BASELINE = "plain"
"""PyTorch's defaults, with which the other variants are compared."""

TakeSteps = Callable[[int], tuple[float, float]]
"""Takes a number of steps; returns the seconds that they took and the peak of memory so far in GiB."""


def measure_backbone_steps(
    workload: BackboneWorkload, variants: Sequence[str], turns: Turns
) -> dict[str, Any]:
    """Return images per second (medians over the rounds), ratios to `plain`, and peaks of memory.

    Raises:
        UsageError: a variant is not possible with this network or device.
        RunError: the process of a variant ended early, for example because memory ran out.
    """
    _check_variants(workload, variants)
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    with _variant_processes(workload, variants) as processes:
        # Separate, because it includes compilation and the first allocation of all memory.
        first = {name: take_steps(1)[0] for name, take_steps in processes.items()}
        for take_steps in processes.values():
            take_steps(_WARM_UP_STEPS)
        for _ in range(turns.rounds):
            for name, take_steps in processes.items():
                speeds[name].append(turns.steps * workload.batch / take_steps(turns.steps)[0])
        peaks = {name: take_steps(0)[1] for name, take_steps in processes.items()}
    medians = {name: statistics.median(rounds) for name, rounds in speeds.items()}
    return {
        "torch": torch.version.__version__,
        **vars(workload),
        "variants": {
            name: {
                "images_per_s": median,
                "rounds": speeds[name],
                "times_plain": median / medians[BASELINE] if BASELINE in medians else None,
                "first_step_s": first[name],
                "peak_gib": peaks[name],
            }
            for name, median in medians.items()
        },
    }


def _check_variants(workload: BackboneWorkload, variants: Sequence[str]) -> None:
    for name in variants:
        train = VARIANTS[name].train
        if workload.device == "cpu" and (train.fused == "on" or train.compile == "reduce-overhead"):
            raise UsageError(f"--variant {name}: needs a GPU; measure another variant, or use --device cuda")
        if train.fused == "on" and workload.backbone not in IRESNET_LAYERS:
            raise UsageError(
                f"--variant {name}: {workload.backbone} has no fused kernels; use --backbone "
                f"{', '.join(IRESNET_LAYERS)}"
            )


@contextmanager
def _variant_processes(workload: BackboneWorkload, variants: Sequence[str]) -> Iterator[dict[str, TakeSteps]]:
    """Start one process per variant; yield the functions that take steps in them."""
    context = HelperContext()
    pipes = {name: context.Pipe() for name in variants}
    processes = [
        context.Process(target=_serve_steps, args=(remote, workload, VARIANTS[name]), daemon=True)
        for name, (_, remote) in pipes.items()
    ]
    for process, (_, remote) in zip(processes, pipes.values(), strict=True):
        process.start()
        remote.close()
    try:
        yield {name: _step_function(local, name) for name, (local, _) in pipes.items()}
    finally:
        for local, _ in pipes.values():
            local.close()  # The processes end when their pipe is closed.
        for process in processes:
            process.join()


def _step_function(pipe: Connection, name: str) -> TakeSteps:
    def take_steps(steps: int) -> tuple[float, float]:
        try:
            pipe.send(steps)
            seconds, peak = pipe.recv()
        except (EOFError, OSError) as error:
            raise RunError(
                f"bench backbone: the process of variant {name} ended early; if memory is short, "
                "reduce --batch-size or measure fewer variants at a time (--variant)"
            ) from error
        return seconds, peak

    return take_steps


def _serve_steps(pipe: Connection, workload: BackboneWorkload, variant: BackboneVariant) -> None:
    """Take steps as requested through the pipe, until it is closed. Runs in its own process."""
    torch.set_num_threads(workload.threads or usable_cores())
    device = torch.device(workload.device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # As training does: it chooses the fastest convolutions.
    if variant.facetrain and device.type == "cpu":
        keep_freed_memory()
    step, is_first = build_step(workload, variant, device), True
    while True:
        try:
            steps = pipe.recv()
        except EOFError:
            return
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(device)
        pipe.send((time.perf_counter() - start, peak_gib(device)))
        if is_first and device.type == "cuda":
            # In the first step cuDNN tries its algorithms, whose workspaces are no part of later steps.
            torch.cuda.reset_peak_memory_stats(device)
        is_first = False


def build_step(
    workload: BackboneWorkload, variant: BackboneVariant, device: torch.device
) -> Callable[[], None]:
    """Return a function that takes one training step.

    Raises:
        ConfigError: the variant is not possible with this network or device.
    """
    torch.manual_seed(0)
    train = variant.train
    backbone = build_backbone(workload.backbone, image_size=workload.image_size)
    if not variant.facetrain:
        use_torch_backward(backbone)
    memory_format = memory_format_for(backbone, device, channels_last=train.channels_last)
    backbone = backbone.to(device, memory_format=memory_format)  # type: ignore[call-overload]
    network = InPrecision(
        backbone, train.precision, device, memory_format=memory_format, compile=train.compile
    )
    choose_trunk(network, train.fused, checkpoint_activations=False)
    optimizer = torch.optim.SGD(
        [parameter for parameter in backbone.parameters() if parameter.requires_grad],
        lr=_LR,
        momentum=0.9,
        weight_decay=5e-4,
        fused=True if variant.facetrain else None,
    )
    side = workload.image_size
    image_BCHW = torch.randn(workload.batch, 3, side, side, device=device)

    def step() -> None:
        network(image_BCHW).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
