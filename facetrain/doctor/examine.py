"""Selection of the checks that apply to this machine, this config and this run."""

from __future__ import annotations

from pathlib import Path

import torch

from facetrain.config.schema import Config
from facetrain.distributed.world import World
from facetrain.doctor import machine, network, software
from facetrain.doctor.check_result import CheckResult, count_text, passed, run_check
from facetrain.doctor.dataset import check_dataset
from facetrain.doctor.disk import check_disk
from facetrain.doctor.run_checks import check_checkpoints, check_learning_rate, check_memory, checkpoint_bytes
from facetrain.models.initialize_from import check_backbone_weights, check_center_count, read_centers
from facetrain.plan.forecast import forecast
from facetrain.run.build import describe_model
from facetrain.run.step_schedule import schedule_steps
from facetrain.verify.pair_set import load_pair_sets


def examine(
    world: World, config: Config | None, run_dir: Path | None, *, gpus: int | None = None
) -> list[CheckResult]:
    """Run the checks that apply to this rank and return their results. Collective.

    The first rank of each machine checks the machine, the leader checks the run, and all ranks check the network.

    Args:
        world: this rank.
        config: run to check; None checks the machine only.
        run_dir: run folder whose checkpoints to verify.
        gpus: number of ranks of the run that the config is meant for; None: as many as there are here.
    """
    results: list[CheckResult] = []
    if world.local_rank == 0:
        results += _examine_machine(world, config)
    results += run_check("network", network.check_network, world.device)
    if world.is_leader:
        if config:
            results += _examine_run(config, world, run_dir, ranks=gpus or world.size)
        else:
            results += run_check("disk", check_disk, run_dir or Path())
        if run_dir:
            results += run_check("checkpoints", check_checkpoints, run_dir)
    return results


def _examine_machine(world: World, config: Config | None) -> list[CheckResult]:
    return [
        *run_check("python", software.check_python),
        *run_check("torch", software.check_torch_and_torchvision),
        *run_check("cuda", software.check_cuda),
        *run_check("host", machine.check_host, world.local_size),
        *run_check("gpus", machine.check_gpus, config.train.precision if config else "fp32"),
        *run_check("shared memory", machine.check_shared_memory, torch.cuda.device_count()),
    ]


def _examine_run(config: Config, world: World, run_dir: Path | None, *, ranks: int) -> list[CheckResult]:
    folder = run_dir or Path(config.run.dir) / config.run.name
    synthetic = config.data.synthetic
    # Images and classes, once they are known: from the generator, the dataset or the config.
    counts: list[tuple[int, int]] = []
    if synthetic and not Path(config.data.train).exists():
        results = [passed("dataset", f"{config.data.train} is generated at the first start")]
        counts.append((synthetic.identities * synthetic.images_per_identity, synthetic.identities))
    else:
        results = run_check("dataset", _examine_dataset, config, counts)
        results += run_check("verification sets", _examine_verification_sets, config)
    if not counts and config.data.num_images and config.data.num_classes:
        counts.append((config.data.num_images, config.data.num_classes))
    if config.model.init_from:
        known_classes = counts[0][1] if counts else None
        results += run_check("initial weights", _examine_initial_weights, config, known_classes)
    for num_images, num_classes in counts:
        results += run_check("batch", _examine_batch, config, ranks, num_images)
        results += run_check("sizes", _examine_sizes, config, world, ranks, num_classes, folder)
    return results


def _examine_dataset(config: Config, counts: list[tuple[int, int]]) -> list[CheckResult]:
    """Check the dataset, and append its numbers of images and classes to `counts`."""
    results, source = check_dataset(
        Path(config.data.train),
        image_size=config.data.image_size,
        num_classes=config.data.num_classes,
        num_images=config.data.num_images,
        min_images_per_identity=config.data.min_images_per_identity,
    )
    counts.append((source.num_images, source.num_classes))
    return results


def _examine_verification_sets(config: Config) -> list[CheckResult]:
    sets = load_pair_sets(config.eval.targets, Path(config.eval_dir))
    names = ", ".join(f"{pairs.name} ({len(pairs.same):,} pairs)" for pairs in sets)
    return [passed("verification sets", names or "none")]


def _examine_initial_weights(config: Config, num_classes: int | None) -> list[CheckResult]:
    assert config.model.init_from is not None
    path = Path(config.model.init_from)
    options = describe_model(config)["backbone"]
    check_backbone_weights(path, options)
    if config.head.init_from == "reinit":
        return [passed("initial weights", f"{path}: fits {options['name']}; the class centers start anew")]
    centers = read_centers(path)
    if num_classes is not None:
        check_center_count(path, centers, num_classes, may_grow=config.head.init_from == "extend")
    return [
        passed("initial weights", f"{path}: fits {options['name']}; {centers.num_classes:,} class centers")
    ]


def _examine_batch(config: Config, ranks: int, num_images: int) -> list[CheckResult]:
    schedule = schedule_steps(config, num_images, ranks)
    message = (
        f"{schedule.local_batch_size:,} images × {count_text(ranks, 'rank')} × "
        f"{count_text(config.optim.accumulate, 'micro-batch', 'micro-batches')} = "
        f"{schedule.global_batch_size:,} per step; {schedule.steps_per_epoch:,} steps per epoch, "
        f"{schedule.total_steps:,} in total"
    )
    learning_rate = check_learning_rate(
        config.optim.name, config.optim.lr, schedule.global_batch_size, warmup=schedule.warmup_steps > 0
    )
    return [passed("batch", message), *learning_rate]


def _examine_sizes(
    config: Config, world: World, ranks: int, num_classes: int, folder: Path
) -> list[CheckResult]:
    cuda = world.device.type == "cuda"
    needed = forecast(config, num_classes, ranks, cuda=cuda)
    kept = config.checkpoint.keep + (config.checkpoint.best_metric is not None)
    size = checkpoint_bytes(needed, ranks)
    results = run_check("disk", check_disk, folder, checkpoint_bytes=size, kept=kept)
    if not cuda:
        # On the CPU all processes and other programs share the memory, so there is no size to compare with.
        return results
    return results + check_memory(needed, torch.cuda.get_device_properties(world.device).total_memory)
