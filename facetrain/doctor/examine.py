"""Selection of the checks that apply to this machine, this config and this run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch

from facetrain.backbone.zoo import build_backbone, takes_landmarks
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.data.images.augment import normalize
from facetrain.distributed.world import World
from facetrain.doctor import machine, network, software
from facetrain.doctor.check_result import CheckResult, count_text, passed, run_check
from facetrain.doctor.dataset import check_dataset, check_landmarks, parts_of
from facetrain.doctor.disk import check_disk
from facetrain.doctor.image_sample import draw_sample, read_images
from facetrain.doctor.input_normalization import check_normalization
from facetrain.doctor.run_checks import check_checkpoints, check_learning_rate, check_memory, checkpoint_bytes
from facetrain.doctor.silent_errors import check_alignment, check_images
from facetrain.doctor.teacher import check_teacher
from facetrain.models.initialize_from import (
    check_backbone_weights,
    check_center_count,
    read_centers,
)
from facetrain.plan.forecast import forecast_stages
from facetrain.run.build.backbone import check_stage_sizes, describe_model, load_initial_weights
from facetrain.run.build.step_schedule import schedule_steps
from facetrain.verify.sets.pair_set import PairSet, load_pair_sets

_NORMALIZATION_IMAGES = 64


def examine(
    world: World, config: Config | None, run_dir: Path | None, *, gpus: int | None = None
) -> list[CheckResult]:
    """Run the checks that apply to this rank and return their results. Collective.

    The first rank of each machine checks the machine, the leader checks the run, and all ranks check the network.

    Args:
        world: this rank.
        config: run to check; None checks the machine only.
        run_dir: run folder whose checkpoints to verify.
        gpus: number of ranks of the run that the config is meant for; None: the ranks of this world.
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
    counts = config.data.num_images, config.data.num_classes
    results: list[CheckResult] = []
    sources: list[FaceDataset] = []
    synthetic = config.data.synthetic
    if synthetic and not Path(config.data.train).exists():
        results.append(passed("dataset", f"{config.data.train} is generated at the first start"))
        counts = synthetic.identities * synthetic.images_per_identity, synthetic.identities
    else:
        sets: list[PairSet] = []
        results += run_check("dataset", _examine_dataset, config, sources)
        results += run_check("verification sets", _examine_verification_sets, config, sets)
        results += run_check("images", _examine_images, config, sources, sets)
    for source in sources:
        counts = source.num_images, source.num_classes
        if takes_landmarks(config.model.backbone):
            results += run_check(
                "landmarks", check_landmarks, source, config.data.train, config.model.backbone
            )
    num_images, num_classes = counts
    if config.model.init_from:
        results += run_check("initial weights", _examine_initial_weights, config, num_classes)
        for source in sources:
            results += run_check("initial normalization", _examine_normalization, config, source)
    if config.distill:
        results += run_check("teacher", check_teacher, config, sources[0] if sources else None)
    if num_images and num_classes:
        results += run_check("batch", _examine_batch, config, ranks, num_images)
        results += run_check("sizes", _examine_sizes, config, world, ranks, (num_images, num_classes), folder)
    return results


def _examine_dataset(config: Config, sources: list[FaceDataset]) -> list[CheckResult]:
    """Check the dataset, and append it to `sources`."""
    results, source = check_dataset(config.data)
    sources.append(source)
    return results


def _examine_verification_sets(config: Config, sets: list[PairSet]) -> list[CheckResult]:
    """Read the verification sets, and append them to `sets`."""
    sets += load_pair_sets(config.eval.targets, Path(config.eval_dir))
    names = ", ".join(f"{pairs.name} ({len(pairs.same):,} pairs)" for pairs in sets)
    return [passed("verification sets", names or "none")]


def _examine_images(config: Config, sources: list[FaceDataset], sets: list[PairSet]) -> list[CheckResult]:
    """Examine a sample of the images of the dataset and of each verification set for silent errors."""
    samples = [
        (name, draw_sample(part.num_images, part.read))
        for source in sources
        for name, part in parts_of(source, config.data.train)
    ]
    num_trained = len(samples)
    samples += [(pairs.name, draw_sample(len(pairs.images), pairs.images.__getitem__)) for pairs in sets]
    results: list[CheckResult] = []
    for number, (name, sample) in enumerate(samples):
        results += check_images(name, sample)
        if number and num_trained:
            results += check_alignment(name, sample, *samples[0])
    return results


def _examine_normalization(config: Config, source: FaceDataset) -> list[CheckResult]:
    """Compare the input that the initial weights were trained on with the input of this run."""
    network = build_backbone(**describe_model(config)["backbone"])
    index = np.linspace(0, source.num_images - 1, _NORMALIZATION_IMAGES).astype(np.int64)
    image_BHWC = read_images(source, index, config.data.image_size)
    merged = load_initial_weights(config, network, partial(normalize, torch.from_numpy(image_BHWC)))
    return check_normalization(str(config.model.init_from), network, image_BHWC, merged)


def _examine_initial_weights(config: Config, num_classes: int | None) -> list[CheckResult]:
    assert config.model.init_from is not None
    path = Path(config.model.init_from)
    options = describe_model(config)["backbone"]
    check_backbone_weights(path, options, first_blocks=config.model.init_blocks == "first")
    message = f"{path}: fits {options['name']}"
    if config.head.init_from == "reinit":
        return [passed("initial weights", f"{message}; the class centers start anew")]
    centers = read_centers(path)
    if num_classes is not None:
        check_center_count(path, centers, num_classes, may_grow=config.head.init_from == "extend")
    return [passed("initial weights", f"{message}; {centers.num_classes:,} class centers")]


def _examine_batch(config: Config, ranks: int, num_images: int) -> list[CheckResult]:
    schedule = schedule_steps(config, num_images, ranks)
    check_stage_sizes(config)
    message = (
        f"{schedule.local_batch_size:,} images × {count_text(ranks, 'rank')} × "
        f"{count_text(config.optim.accumulate, 'micro-batch', 'micro-batches')} = "
        f"{schedule.global_batch_size:,} per step; {schedule.steps_per_epoch:,} steps per epoch, "
        f"{schedule.total_steps:,} in total"
    )
    if config.train.stages:
        for number, stage in enumerate(schedule.stages, start=1):
            message += f"; stage {number} until step {stage.stop_step:,}: {stage.describe()}"
    results = [passed("batch", message)]
    if not config.data.synthetic:
        # Published rates are for photos of many identities; generated faces are for demonstrations.
        results += check_learning_rate(
            config.optim, schedule.global_batch_size, has_initial_weights=bool(config.model.init_from)
        )
    return results


def _examine_sizes(
    config: Config, world: World, ranks: int, counts: tuple[int, int], folder: Path
) -> list[CheckResult]:
    """Check disk and memory for a dataset with `counts` images and identities."""
    num_images, num_classes = counts
    cuda = world.device.type == "cuda"
    needed = forecast_stages(config, num_classes, ranks, cuda=cuda).needed
    size, steps = checkpoint_bytes(needed, ranks), schedule_steps(config, num_images, ranks).total_steps
    results = run_check("disk", check_disk, folder, config, checkpoint_bytes=size, steps=steps)
    if not cuda:
        # On the CPU all processes and other programs share the memory, so there is no size to compare with.
        return results
    return results + check_memory(needed, torch.cuda.get_device_properties(world.device).total_memory)
