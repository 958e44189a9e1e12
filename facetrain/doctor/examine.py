"""Checks that apply to this machine and to the data of a config."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from facetrain.backbone.zoo import takes_landmarks
from facetrain.config.paths import address_of_set
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.data.identity_counts import count_images
from facetrain.data.label_problems import find_label_problem
from facetrain.data.loading.sampler import epoch_size
from facetrain.data.mixture import parts_of
from facetrain.distributed.process_lifetime import launched_by_torchrun
from facetrain.distributed.topology import processes_of_host
from facetrain.distributed.world import World
from facetrain.doctor.check_result import CheckResult, errors_as_failures, passed, warned_if, warning
from facetrain.doctor.image_sample import draw_sample
from facetrain.doctor.machine import check_machine, check_network
from facetrain.doctor.silent_errors import (
    check_alignment,
    check_images,
    check_readable,
    check_set_readable,
)
from facetrain.run.parts.open_data import open_training_set
from facetrain.run.parts.step_schedule import schedule_steps
from facetrain.run.suited_settings import gather_facts, keys_to_choose, suited_settings, unsuited_settings
from facetrain.text import count_text, images_text
from facetrain.verify.sets.pair_set import PairSet, load_pair_sets
from facetrain.verify.training_images import HOLD_OUT_ADVICE, sets_of_training_images


def examine(
    world: World, config: Config | None, chosen_without: frozenset[str] | None = None
) -> list[CheckResult]:
    """Run the checks that apply to this rank and return their results. Collective.

    The first rank of each machine checks the machine, the leader checks the data of the config (if there is one), and
    all ranks check the network.

    Without a launcher, the batch is that of as many processes as `facetrain train` starts on this machine.

    Args:
        world: ranks that take part.
        config: config of a run; None for the machine alone.
        chosen_without: for a dataset without a config, whose settings a run chooses: the keys that the command sets.
    """
    results: list[CheckResult] = []
    local_size, size = world.local_size, world.size
    if not launched_by_torchrun():
        local_size = size = processes_of_host(config.train.device if config else "auto")
    if world.local_rank == 0:
        with errors_as_failures(results, "machine"):
            precision = config.train.precision if config else "auto"
            results += check_machine(local_size, world.host_cores, precision)
    # On every rank: it is a collective.
    with errors_as_failures(results, "network"):
        results.append(check_network(world.device))
    if world.is_leader and config:
        _examine_data(results, config, size, chosen_without)
    return results


def _examine_data(
    results: list[CheckResult], config: Config, world_size: int, chosen_without: frozenset[str] | None
) -> None:
    """Check training set, verification sets and a sample of the images of each; add to the results."""
    source: FaceDataset | None = None
    sets: list[PairSet] = []
    with errors_as_failures(results, "dataset"):
        source = open_training_set(config)
        results += check_dataset(config, source)
    if source is not None:
        with errors_as_failures(results, "batch"):
            results += check_settings(config, source, world_size, chosen_without)
            schedule_steps(config, epoch_size(source), world_size)
    with errors_as_failures(results, "verification sets"):
        addresses = [each for each in config.eval.targets if address_of_set(each, config.eval_dir)]
        local = [each for each in config.eval.targets if each not in addresses]
        sets = load_pair_sets(local, config.local_eval_dir)
        names = [f"{pairs.name} ({count_text(len(pairs.same), 'pair')})" for pairs in sets]
        names += [f"{each} (an address: downloaded and checked when the run starts)" for each in addresses]
        results.append(passed("verification sets", ", ".join(names) or "none"))
        for remark in sets_of_training_images(sets, source, config.data.train) if source else ():
            results.append(warning("verification sets", remark, HOLD_OUT_ADVICE, "certain"))
    with errors_as_failures(results, "images"):
        results += _examine_images(config, source, sets)


def _examine_images(config: Config, source: FaceDataset | None, sets: list[PairSet]) -> Iterator[CheckResult]:
    """Examine a sample of the images of the training set and of each verification set."""
    data = config.data
    parts = [] if source is None else parts_of(source, data.train)
    samples = [(name, draw_sample(part.num_images, part.read, part.location)) for name, part in parts]
    for name, sample in samples:
        yield check_readable(name, sample, data.image_size, skip_bad=data.bad_records == "skip")
    for pairs in sets:
        sample = draw_sample(len(pairs.images), pairs.images.__getitem__)
        yield from check_set_readable(pairs.name, sample)
        samples.append((pairs.name, sample))
    for number, (name, sample) in enumerate(samples):
        yield from check_images(name, sample)
        # The first sample is of the training data, with which the others are compared.
        if number and parts:
            yield from check_alignment(name, sample, *samples[0])


def check_dataset(config: Config, source: FaceDataset) -> Iterator[CheckResult]:
    """Describe the training set, and check labels and landmarks."""
    present, counts = count_images(source)
    fewest = counts.min() if len(present) == source.num_classes else 0
    message = (
        f"{config.data.train}: {images_text(source.num_images, source.num_classes)}, "
        f"{fewest:,} to {counts.max():,} of each"
    )
    yield passed("dataset", message)
    yield from _check_labels(source, config.data.train)
    if takes_landmarks(config.model.backbone):
        yield _check_landmarks(source)


def check_settings(
    config: Config, source: FaceDataset, world_size: int, chosen_without: frozenset[str] | None
) -> Iterator[CheckResult]:
    """State the settings that a run chooses for the dataset, and compare the others of its config with them.

    `world_size` is the number of processes of the run; for `chosen_without` see `examine`.
    """
    facts = gather_facts(config, source, world_size)
    chosen = keys_to_choose(config, chosen_without)
    for each in suited_settings(facts):
        if each.key in chosen:
            yield passed(each.key, f"{each.value}, {each.reason}")
    for suited, fault in unsuited_settings(config, facts):
        if suited.key not in chosen:
            yield warning(suited.key, fault, f"set it to {suited.value}: {suited.reason}", "likely")


def _check_labels(source: FaceDataset, name: str) -> list[CheckResult]:
    """Check the labels of each dataset of a mixture, or of the dataset itself."""
    results = []
    for place, part in parts_of(source, name):
        if (problem := find_label_problem(part)) is not None:
            message = problem.message if part is source else f"{place}: {problem.message}"
            results.append(warning("identities", message, problem.advice, problem.certainty))
    message = f"every label from 0 to {source.num_classes - 1:,} has an image"
    return results or [passed("identities", message)]


def _check_landmarks(source: FaceDataset) -> CheckResult:
    """Count the images without a face, of a dataset that has landmarks."""
    landmarks_N52 = source.landmarks
    assert landmarks_N52 is not None
    missing = int(np.isnan(landmarks_N52[:, 0, 0]).sum())
    message = f"{source.num_images - missing:,} of {source.num_images:,} images have landmarks"
    advice = (
        "the others train with the template of an aligned face: check images and detector, and write the landmarks "
        "again with `facetrain data landmarks`"
    )
    return warned_if(missing > source.num_images / 2, "landmarks", message, advice)
