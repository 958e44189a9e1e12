"""Our whole step beside that of the plain arcface_torch recipe, in turn in one run.

    python -m benchmarks.train                                                        r18, all cores
    torchrun --nproc-per-node 2 -m benchmarks.train                                   the same on two ranks
    python -m benchmarks.train --gpu --data FOLDER                                    r50 and r100, every combination
    torchrun --nproc-per-node 8 -m benchmarks.train --gpu --data FOLDER               the same on eight GPUs

Images per second of the plain recipe and of ours on one batch that lies on the device, and of ours on RecordIO
input; MFU, and on CUDA each one's own peak of memory. The plain recipe (benchmarks/plain_recipe.py) is given
normalized images, so that it is spared the augmentation which ours does, and on the CPU profits from our
allocator's settings, which are the whole process's. --gpu stands for --backbones r50 r100
--batch-sizes 256 512 --identities 360232 2059906 --steps 20.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.plain_recipe import PlainRecipe
from facetrain.backbone.zoo import build_backbone
from facetrain.bench.loader import bench_source
from facetrain.bench.machine import measure_machine
from facetrain.bench.train import Batches, Training, open_loader, prepare, rate_of, same_batch
from facetrain.config.loading import build_config
from facetrain.config.schema import Config
from facetrain.data.augment import normalize
from facetrain.data.dataset import FaceDataset
from facetrain.distributed.world import World, join
from facetrain.plan.forecast import backbone_cost, head_shape

_WARM_UP = 3
_CPU = {"backbones": ["r18"], "batch_sizes": [32], "identities": [10_000], "steps": 5}
_GPU = {
    "backbones": ["r50", "r100"],
    "batch_sizes": [256, 512],
    "identities": [360_232, 2_059_906],
    "steps": 20,
}
Work = Callable[[int], None]


class Contender:
    """What takes steps, and how much memory of the GPU it needed itself."""

    def __init__(self, name: str, build: Callable[[], Work], device: torch.device) -> None:
        self.name, self.rates, self._cuda = name, list[float](), device.type == "cuda"
        before = self._allocated()
        self._take, self._device = build(), device
        self._own = self._allocated() - before
        self._most = 0

    def measure(self, steps: int, images: int) -> None:
        """Take some steps, then some more that count."""
        self._take(_WARM_UP)
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        before = self._allocated()
        self.rates.append(rate_of(lambda: self._take(steps), images, self._device))
        if self._cuda:
            self._most = max(self._most, torch.cuda.max_memory_allocated() - before)

    def report(self, flops_per_image: int, peak_flops: float) -> dict[str, Any]:
        """Return the median speed, and the share of the machine's matrix products that it makes use of."""
        speed = statistics.median(self.rates)
        memory = {"peak_gib": (self._own + self._most) / 2**30} if self._cuda else {}
        return {
            "images_per_s": speed,
            "mfu": speed * flops_per_image / peak_flops,
            "rounds": self.rates,
            **memory,
        }

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._cuda else 0


def plain(config: Config, world: World, classes: int, batch: int) -> Work:
    """Build the plain recipe with random images and labels."""
    torch.manual_seed(0)
    side = config.data.image_size
    recipe = PlainRecipe(
        build_backbone(config.model.backbone, image_size=side), classes, config.train.precision, world.device
    )
    image_BCHW = normalize(torch.randint(256, (batch, side, side, 3), dtype=torch.uint8).to(world.device))
    label_B = torch.randint(classes, (batch,)).to(world.device)

    def take(steps: int) -> None:
        for _ in range(steps):
            recipe.step(image_BCHW, label_B)

    return take


def taking(training: Training, batches: Batches) -> Work:
    """Take steps of ours."""
    return lambda steps: training.take(itertools.islice(batches, steps))


def measure(
    config: Config, world: World, source: FaceDataset, classes: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure one combination. Collective."""
    classes = max(classes, source.num_classes)
    with tempfile.TemporaryDirectory() as scratch:
        contenders = [
            Contender(
                "plain", lambda: plain(config, world, classes, config.train.batch_size or 0), world.device
            )
        ]
        training = None

        def ours() -> Work:
            nonlocal training
            training = prepare(config, world, classes, Path(scratch), source)
            return taking(training, same_batch(training, classes))

        contenders.append(Contender("ours", ours, world.device))
        assert training is not None
        loader = open_loader(training, source)
        contenders.append(Contender("ours_records", lambda: taking(training, iter(loader)), world.device))
        peak = 0.0
        try:
            for _ in range(options.rounds):  # in turn: a busy machine hits all alike
                peak = max(peak, measure_machine(config.train.precision, world.device).flops)
                for contender in contenders:
                    contender.measure(options.steps, options.steps * training.schedule.global_batch_size)
        finally:
            loader.close()
    batch = training.schedule.local_batch_size
    shape = head_shape(config, classes, world.size, batch)
    flops = backbone_cost(config, world.size).flops_per_image + 6 * shape.width * shape.sampled * world.size
    found = {contender.name: contender.report(flops, peak) for contender in contenders}
    speed = {name: report["images_per_s"] for name, report in found.items()}
    return {
        "backbone": config.model.backbone, "batch": batch, "ranks": world.size, "identities": classes,
        "precision": config.train.precision, "threads": torch.get_num_threads(), "device": world.device.type,
        **found, "ours_times_plain": speed["ours"] / speed["plain"],
        "records_of_synthetic": speed["ours_records"] / speed["ours"],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="what a GPU is measured with")
    parser.add_argument("--backbones", nargs="+")
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="images per rank")
    parser.add_argument("--identities", nargs="+", type=int)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--compile", action="store_true", help="compile our network")
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--data", type=Path, help="a dataset; generated images of about 8 kB if left out")
    parser.add_argument("--steps", type=int, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    o = parser.parse_args(argv)
    usual = _GPU if o.gpu else _CPU
    vars(o).update({name: value for name, value in usual.items() if vars(o)[name] is None})
    reports = []
    with join(o.device) as world, bench_source(o.data, size=o.image_size) as source:
        for name, batch, classes in itertools.product(o.backbones, o.batch_sizes, o.identities):
            described = {
                "data": {"train": "generated", "image_size": o.image_size},
                "model": {"backbone": name},
                "optim": {"lr": 1e-6},  # so small that noise cannot make the loss diverge
                "train": {"batch_size": batch, "precision": o.precision, "compile": o.compile},
            }
            reports.append(measure(build_config(described, "benchmarks.train"), world, source, classes, o))
            if world.is_leader:
                print(json.dumps(reports[-1]), file=sys.stderr)
        if world.is_leader:
            print(json.dumps({"torch": torch.__version__, "reports": reports}, indent=1))


if __name__ == "__main__":
    main()
