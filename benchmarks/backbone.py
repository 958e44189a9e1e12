"""Backbone benchmark: training steps from PyTorch's defaults to facetrain's settings.

A step is the forward pass, the backward pass and the update by SGD with momentum; there is no head, and the
images are on the device. Each variant runs in its own process, because allocator settings hold for a whole
process; the processes take turns.
"""

from __future__ import annotations

import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import run
from facetrain.backbone.prelu import use_torch_backward
from facetrain.backbone.zoo import build_backbone
from facetrain.bench.machine_peak import synchronize
from facetrain.bench.workloads import Turns, in_turn
from facetrain.cpu_cores import usable_cores
from facetrain.distributed.ddp import data_parallel
from facetrain.distributed.process_setup import keep_freed_memory
from facetrain.telemetry.memory import peak_gib
from facetrain.training.precision import InPrecision, memory_format_for

_WARM_UP_STEPS = 3
_LR = 1e-6
"""Small enough that the weights hardly change: the loss has no labels to learn from."""


class Variant(NamedTuple):
    """How a step is run."""

    precision: str
    channels_last: bool = True
    compile: str = "off"


VARIANTS = {
    "plain": Variant("fp32", channels_last=False),
    "bf16": Variant("bf16", channels_last=False),
    "channels_last": Variant("bf16"),
    "facetrain": Variant("bf16"),
    "facetrain_in_ddp": Variant("bf16"),
    "facetrain_compiled": Variant("bf16", compile="on"),
    "facetrain_compiled_in_ddp": Variant("bf16", compile="on"),
    "facetrain_replayed": Variant("bf16", compile="reduce-overhead"),
}
"""Precision, memory layout and compiler. Variants of facetrain also use the fused optimizer
and, on the CPU, its allocator settings and PReLU backward pass. Two of them are wrapped in DDP of one rank, in which
torch.compile splits graphs at the ends of DDP's buckets."""
ON_EVERY_DEVICE = ["plain", "bf16", "channels_last", "facetrain", "facetrain_compiled"]
"""Variants for all devices. Replayed code needs a GPU."""
BASELINE = "plain"
"""PyTorch's defaults, with which the other variants are compared."""


@dataclass(frozen=True)
class BackboneWorkload:
    """Network, images and device that all variants of a backbone's step have in common."""

    backbone: str = "r18"
    batch: int = 32
    """Images per step."""
    image_size: int = 112
    """Width and height of an image in pixels."""
    device: str = "cpu"


def measure_backbones(
    variant: list[str] = ON_EVERY_DEVICE,
    backbone: str = "r18",
    batch_size: int = 32,
    image_size: int = 112,
    device: str = "cpu",
    steps: int = 5,
    rounds: int = 3,
) -> dict[str, Any]:
    """Return `measure_backbone_steps` of a network; the variant facetrain_replayed needs a GPU."""
    workload = BackboneWorkload(backbone, batch_size, image_size, device)
    return measure_backbone_steps(workload, variant, Turns(steps, rounds))


def measure_backbone_steps(
    workload: BackboneWorkload, variants: Sequence[str], turns: Turns
) -> dict[str, Any]:
    """Return images per second (medians over the rounds), ratios to `plain`, and peaks of memory."""
    # Not `HelperContext`, whose processes lack the main module, which is this one as a command.
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        processes = {name: stack.enter_context(ProcessPoolExecutor(1, spawn)) for name in variants}

        def take_steps(name: str, steps: int) -> tuple[float, float]:
            return processes[name].submit(_take_steps, workload, name, steps).result()

        # Separate, because it includes compilation and the first allocation of all memory.
        first = {name: take_steps(name, 1)[0] for name in variants}
        for name in variants:
            take_steps(name, _WARM_UP_STEPS)
        peaks = dict.fromkeys(variants, 0.0)

        def measure(name: str) -> float:
            seconds, peak = take_steps(name, turns.steps)
            peaks[name] = max(peaks[name], peak)
            return turns.steps * workload.batch / seconds

        speeds = in_turn({name: partial(measure, name) for name in variants}, turns.rounds)
    medians = {name: statistics.median(rounds) for name, rounds in speeds.items()}
    return {
        "torch": torch.version.__version__,
        "threads": usable_cores(),
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


def _take_steps(workload: BackboneWorkload, name: str, steps: int) -> tuple[float, float]:
    """Take steps in this process, which has only this variant."""
    device, step = torch.device(workload.device), _prepared_step(workload, name)
    if device.type == "cuda":
        # The peak of these steps alone: in the first one, cuDNN's search needs further memory.
        torch.cuda.reset_peak_memory_stats(device)
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return time.perf_counter() - start, peak_gib(device)


@functools.cache
def _prepared_step(workload: BackboneWorkload, name: str) -> Callable[[], None]:
    """Set up this process for a variant, and build its step once."""
    torch.set_num_threads(usable_cores())
    device = torch.device(workload.device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # As training does: it chooses the fastest convolutions.
    is_facetrain, variant = name.startswith("facetrain"), VARIANTS[name]
    if device.type == "cpu" and is_facetrain:
        keep_freed_memory()
    torch.manual_seed(0)
    backbone = build_backbone(workload.backbone, image_size=workload.image_size)
    if not is_facetrain:
        use_torch_backward(backbone)
    memory_format = memory_format_for(backbone, device) if variant.channels_last else torch.contiguous_format
    backbone = backbone.to(device, memory_format=memory_format)  # type: ignore[call-overload]
    network: nn.Module = InPrecision(
        backbone, variant.precision, device, memory_format=memory_format, compile=variant.compile
    )
    if name.endswith("in_ddp"):
        # Of a single rank, which sends nothing: what remains is the cost of DDP itself.
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        network = data_parallel(network, device, accumulate=1)
    optimizer = torch.optim.SGD(
        [parameter for parameter in backbone.parameters() if parameter.requires_grad],
        lr=_LR,
        momentum=0.9,
        weight_decay=5e-4,
        fused=True if is_facetrain else None,
    )
    side = workload.image_size
    image_BCHW = torch.randn(workload.batch, 3, side, side, device=device)

    def step() -> None:
        network(image_BCHW).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    run(measure_backbones)
