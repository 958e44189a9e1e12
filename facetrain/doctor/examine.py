"""Which checks of `facetrain doctor` apply, and what they are asked."""

from __future__ import annotations

from pathlib import Path

import torch

from facetrain.config.schema import Config
from facetrain.distributed.world import World
from facetrain.doctor import machine, network, software
from facetrain.doctor.check_result import Finding, count, look, ok
from facetrain.doctor.dataset import check_dataset
from facetrain.doctor.disk import check_disk
from facetrain.doctor.run_checks import check_checkpoints, check_learning_rate, check_memory, checkpoint_bytes
from facetrain.plan.forecast import forecast
from facetrain.run.step_schedule import schedule_steps
from facetrain.verify.pair_set import load_pair_sets


def examine(world: World, config: Config | None, run_dir: Path | None) -> list[Finding]:
    """Run the checks of this rank: the machine's once a machine, the run's on the leader. Collective."""
    found: list[Finding] = []
    if world.local_rank == 0:
        found += _examine_machine(world, config)
    found += look("network", network.check_network, world.device)
    if world.is_leader:
        if config:
            found += _examine_run(config, world, run_dir)
        else:
            found += look("disk", check_disk, run_dir or Path())
        if run_dir:
            found += look("checkpoints", check_checkpoints, run_dir)
    return found


def _examine_machine(world: World, config: Config | None) -> list[Finding]:
    return [
        *look("python", software.check_python),
        *look("torch", software.check_torch_and_torchvision),
        *look("cuda", software.check_cuda),
        *look("host", machine.check_host, world.local_size),
        *look("gpus", machine.check_gpus, config.train.precision if config else "fp32"),
        *look("shared memory", machine.check_shared_memory, torch.cuda.device_count()),
    ]


def _examine_run(config: Config, world: World, run_dir: Path | None) -> list[Finding]:
    folder = run_dir or Path(config.run.dir) / config.run.name
    wanted = config.data.synthetic
    counts: list[tuple[int, int]] = []
    if wanted and not Path(config.data.train).exists():
        found = [ok("dataset", f"{config.data.train} is drawn at the first start")]
        counts.append((wanted.identities * wanted.images_per_identity, wanted.identities))
    else:
        found = look("dataset", _examine_dataset, config, counts)
        found += look("verification sets", _examine_targets, config)
    if not counts and config.data.num_images and config.data.num_classes:
        counts.append((config.data.num_images, config.data.num_classes))
    for num_images, num_classes in counts:
        found += look("batch", _examine_batch, config, world, num_images)
        found += look("sizes", _examine_sizes, config, world, num_classes, folder)
    return found


def _examine_dataset(config: Config, counts: list[tuple[int, int]]) -> list[Finding]:
    findings, source = check_dataset(
        Path(config.data.train),
        image_size=config.data.image_size,
        num_classes=config.data.num_classes,
        num_images=config.data.num_images,
        min_images_per_identity=config.data.min_images_per_identity,
    )
    counts.append((source.num_images, source.num_classes))
    return findings


def _examine_targets(config: Config) -> list[Finding]:
    sets = load_pair_sets(config.eval.targets, Path(config.eval_dir))
    return [ok("verification sets", ", ".join(f"{p.name} ({len(p.same):,} pairs)" for p in sets) or "none")]


def _examine_batch(config: Config, world: World, num_images: int) -> list[Finding]:
    schedule = schedule_steps(config, num_images, world.size)
    found = (
        f"{schedule.local_batch_size:,} images × {count(world.size, 'rank')} × "
        f"{count(config.optim.accumulate, 'micro-batch', 'micro-batches')} = "
        f"{schedule.global_batch_size:,} a step; {schedule.steps_per_epoch:,} steps an epoch, "
        f"{schedule.total_steps:,} in all"
    )
    rate = check_learning_rate(
        config.optim.name, config.optim.lr, schedule.global_batch_size, warmup=schedule.warmup_steps > 0
    )
    return [ok("batch", found), *rate]


def _examine_sizes(config: Config, world: World, num_classes: int, folder: Path) -> list[Finding]:
    cuda = world.device.type == "cuda"
    needed = forecast(config, num_classes, world.size, cuda=cuda)
    kept = config.checkpoint.keep + (config.checkpoint.best_metric is not None)
    size = checkpoint_bytes(needed, world.size)
    found = look("disk", check_disk, folder, checkpoint_bytes=size, kept=kept)
    if not cuda:
        return found
    return found + check_memory(needed, torch.cuda.get_device_properties(world.device).total_memory)
