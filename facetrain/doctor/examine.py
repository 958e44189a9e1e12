"""Selection of the checks that apply to this machine, this config and this run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from facetrain.backbone.zoo import takes_landmarks
from facetrain.config.schema import Config
from facetrain.data.build import training_data_path
from facetrain.data.dataset import FaceDataset
from facetrain.data.dataset_card import read_cards
from facetrain.data.label_problems import parts_of
from facetrain.data.synthetic.dataset_writer import SYNTHETIC_CARD
from facetrain.distributed.world import World
from facetrain.doctor.check_result import CheckResult, count_text, errors_as_failures, passed
from facetrain.doctor.dataset import check_dataset, check_landmarks
from facetrain.doctor.disk import check_disk
from facetrain.doctor.image_sample import draw_sample
from facetrain.doctor.machine import check_machine, check_network, check_software
from facetrain.doctor.run_checks import check_checkpoints, check_learning_rate, check_memory, checkpoint_bytes
from facetrain.doctor.silent_errors import check_alignment, check_images
from facetrain.models.initialize_from import check_backbone_weights, check_center_count, read_centers
from facetrain.plan.forecast import forecast_stages
from facetrain.remote.download import local_path
from facetrain.run.parts.backbone import describe_model
from facetrain.run.parts.step_schedule import schedule_steps
from facetrain.verify.sets.pair_set import PairSet, load_pair_sets


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
        with errors_as_failures(results, "machine"):
            results += check_software()
            results += check_machine(world.local_size, config.train.precision if config else "fp32")
    # On every rank: it is a collective.
    with errors_as_failures(results, "network"):
        results.append(check_network(world.device))
    if not world.is_leader:
        return results
    if config:
        _examine_run(results, config, world, run_dir, ranks=gpus or world.size)
    else:
        with errors_as_failures(results, "disk"):
            results += check_disk(run_dir or Path())
    if run_dir:
        with errors_as_failures(results, "checkpoints"):
            results += check_checkpoints(run_dir)
    return results


def _examine_run(
    results: list[CheckResult], config: Config, world: World, run_dir: Path | None, *, ranks: int
) -> None:
    """Check dataset, verification sets, weights, sizes and disk of a run; add to the results."""
    data, train = config.data, config.data.train
    source: FaceDataset | None = None
    num_images, num_classes = data.num_images, data.num_classes
    sets: list[PairSet] = []
    with errors_as_failures(results, "dataset"):
        found, source = check_dataset(data)
        results += found
        num_images, num_classes = source.num_images, source.num_classes
    with errors_as_failures(results, "verification sets"):
        sets = load_pair_sets(config.eval.targets, Path(config.eval_dir))
        names = ", ".join(f"{pairs.name} ({len(pairs.same):,} pairs)" for pairs in sets)
        results.append(passed("verification sets", names or "none"))
    with errors_as_failures(results, "images"):
        results += _examine_images(train, source, sets)
    if source is not None and takes_landmarks(config.model.backbone):
        with errors_as_failures(results, "landmarks"):
            results.append(check_landmarks(source, train, config.model.backbone))
    if config.model.init_from:
        path = local_path(config.model.init_from)
        with errors_as_failures(results, "initial weights"):
            results.append(_examine_initial_weights(config, path, num_classes))
    # Also without the dataset on this machine, if the config states both numbers.
    if num_images and num_classes:
        with errors_as_failures(results, "batch"):
            results += _examine_batch(config, ranks, num_images)
        with errors_as_failures(results, "sizes"):
            folder = run_dir or Path(config.run.dir) / config.run.name
            results += _examine_sizes(config, world, ranks, (num_images, num_classes), folder)


def _examine_images(train: str, source: FaceDataset | None, sets: list[PairSet]) -> Iterator[CheckResult]:
    """Examine a sample of the images of the dataset and of each verification set for silent errors."""
    parts = [] if source is None else parts_of(source, train)
    samples = [(name, draw_sample(part.num_images, part.read)) for name, part in parts]
    samples += [(pairs.name, draw_sample(len(pairs.images), pairs.images.__getitem__)) for pairs in sets]
    for number, (name, sample) in enumerate(samples):
        yield from check_images(name, sample)
        # The first sample is of the training data, with which the others are compared.
        if number and parts:
            yield from check_alignment(name, sample, *samples[0])


def _examine_initial_weights(config: Config, path: Path, num_classes: int | None) -> CheckResult:
    options = describe_model(config)["backbone"]
    check_backbone_weights(path, options, first_blocks=config.model.init_blocks == "first")
    message = f"{path}: fits {options['name']}"
    if config.head.init_from == "reinit":
        return passed("initial weights", f"{message}; the class centers start anew")
    centers = read_centers(path)
    if num_classes is not None:
        check_center_count(path, centers, num_classes, may_grow=config.head.init_from == "extend")
    return passed("initial weights", f"{message}; {centers.num_classes:,} class centers")


def _examine_batch(config: Config, ranks: int, num_images: int) -> Iterator[CheckResult]:
    schedule = schedule_steps(config, num_images, ranks)
    message = (
        f"{schedule.local_batch_size:,} images × {count_text(ranks, 'rank')} × "
        f"{count_text(config.optim.accumulate, 'micro-batch', 'micro-batches')} = "
        f"{schedule.global_batch_size:,} per step; {schedule.steps_per_epoch:,} steps per epoch, "
        f"{schedule.total_steps:,} in total"
    )
    if config.train.stages:
        for number, stage in enumerate(schedule.stages, start=1):
            message += f"; stage {number} until step {stage.stop_step:,}: {stage.describe()}"
    yield passed("batch", message)
    if all(card.origin != SYNTHETIC_CARD.origin for card in read_cards(training_data_path(config.data))):
        # Published rates are for photos of many identities; drawn faces are for demonstrations.
        yield check_learning_rate(
            config.optim, schedule.global_batch_size, has_initial_weights=bool(config.model.init_from)
        )


def _examine_sizes(
    config: Config, world: World, ranks: int, counts: tuple[int, int], folder: Path
) -> Iterator[CheckResult]:
    """Check disk and memory for a dataset with `counts` images and identities."""
    num_images, num_classes = counts
    cuda = world.device.type == "cuda"
    needed = forecast_stages(config, num_classes, ranks, cuda=cuda).needed
    if (
        cuda
    ):  # on a CPU all processes and other programs share the memory, so there is no size to compare with
        yield check_memory(needed, torch.cuda.get_device_properties(world.device).total_memory)
    size, steps = checkpoint_bytes(needed, ranks), schedule_steps(config, num_images, ranks).total_steps
    yield from check_disk(folder, config, checkpoint_bytes=size, steps=steps)
