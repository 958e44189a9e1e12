"""Checks of the dataset: it can be read, and it matches the config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from facetrain.data.dataset import FaceDataset, image_landmarks
from facetrain.data.dataset_card import card_path, read_cards
from facetrain.data.images.decode import decode_rgb
from facetrain.data.mixture import MixtureDataset
from facetrain.data.open_dataset import check_counts, open_dataset, require_landmarks
from facetrain.data.published_datasets import require_dataset
from facetrain.doctor.check_result import CERTAIN, LIKELY, OK, POSSIBLE, CheckResult, failed, passed, warning
from facetrain.errors import DataError
from facetrain.run.start_checks import count_images, find_label_problem

_SAMPLES = 32


def check_dataset(
    folder: Path,
    *,
    image_size: int,
    num_classes: int | None = None,
    num_images: int | None = None,
    min_images_per_identity: int = 1,
    skip_bad: bool = False,
) -> tuple[list[CheckResult], FaceDataset]:
    """Open a dataset, count its images and identities, and decode some images.

    With `skip_bad`, training skips images that cannot be read (`data.bad_records: skip`).

    Raises:
        DataError: the dataset cannot be opened, or it contradicts the given numbers.
    """
    require_dataset(folder, num_classes=num_classes, num_images=num_images)
    source = open_dataset(folder, min_images_per_identity=min_images_per_identity)
    check_counts(source, folder, num_classes=num_classes, num_images=num_images)
    present, counts = count_images(source)
    fewest = counts.min() if len(present) == source.num_classes else 0
    message = (
        f"{folder}: {source.num_images:,} images of {source.num_classes:,} identities, "
        f"{fewest:,} to {counts.max():,} of each"
    )
    results = [passed("dataset", message), *_check_labels(source)]
    results.append(_check_images(source, image_size, skip_bad=skip_bad))
    return results, source


def check_landmarks(source: FaceDataset, train: str, backbone: str) -> list[CheckResult]:
    """Check that the images have landmarks, for a backbone that takes them, and count those without a face.

    Raises:
        DataError: there is no landmark file.
    """
    require_landmarks(source, Path(train), backbone)
    landmarks_N52 = image_landmarks(source)
    assert landmarks_N52 is not None
    missing = int(np.isnan(landmarks_N52[:, 0, 0]).sum())
    message = f"{source.num_images - missing:,} of {source.num_images:,} images have landmarks"
    if missing > source.num_images / 2:
        advice = (
            "the others train with those of an aligned face: check images and detector, and write the landmarks again "
            "with `facetrain data landmarks`"
        )
        return [warning("landmarks", message, advice)]
    return [passed("landmarks", message)]


def check_licenses(folder: Path, *, commercial: bool) -> list[CheckResult]:
    """Compare the licenses in the dataset cards with the use of the model.

    Raises:
        DataError: a card is damaged.
    """
    cards = read_cards(folder)
    forbidden = [card for card in cards if card.forbids_sale]
    unstated = [card for card in cards if not card.has_license]
    if commercial and forbidden:
        terms = "; ".join(f"{card.name}: {card.license}" for card in forbidden)
        return [
            failed(
                "licenses",
                f"run.commercial is true, but the license of the data forbids commercial use: {terms}",
                "train on other data, get a license for this use, or set run.commercial to false",
            )
        ]
    if unstated:
        names = ", ".join(card.name for card in unstated)
        message = f"no license is stated for {names}"
        advice = f"write origin, license and consent into {card_path(folder)}"
        return [warning("licenses", message, advice)] if commercial else [passed("licenses", message)]
    return [passed("licenses", "; ".join(f"{card.name}: {card.license}" for card in cards))]


def parts_of(source: FaceDataset, name: str) -> list[tuple[str, FaceDataset]]:
    """Return the datasets of a mixture with their names, or the dataset itself: an error may be in one of them."""
    if isinstance(source, MixtureDataset):
        return [(f"{name}, dataset {number}", one) for number, one in enumerate(source.datasets, start=1)]
    return [(name, source)]


def _check_labels(source: FaceDataset) -> list[CheckResult]:
    if not isinstance(source, MixtureDataset):
        return [_check_identities(source)]
    results = [_check_identities(one) for one in source.datasets]
    found = [
        replace(result, message=f"dataset {number} of the mixture: {result.message}")
        for number, result in enumerate(results, start=1)
        if result.status != OK
    ]
    return found or [passed("identities", f"every label from 0 to {source.num_classes - 1:,} has an image")]


def _check_identities(source: FaceDataset) -> CheckResult:
    problem = find_label_problem(source)
    if problem is None:
        return passed("identities", f"every label from 0 to {source.num_classes - 1:,} has an image")
    certainty = ""
    if problem.first_label:
        certainty = POSSIBLE if not problem.is_shifted else CERTAIN if problem.first_label == 1 else LIKELY
    return warning("identities", problem.message, problem.advice, certainty)


def _check_images(source: FaceDataset, image_size: int, *, skip_bad: bool) -> CheckResult:
    chosen = np.unique(np.linspace(0, source.num_images - 1, _SAMPLES).astype(np.int64)).tolist()
    errors, shapes = [], set()
    for number in chosen:
        try:
            shapes.add(decode_rgb(source.read(number), location=source.location(number)).shape[:2])
        except DataError as error:
            errors.append(str(error))
    if errors:
        message = f"{len(errors)} of {len(chosen)} images cannot be read; the first: {errors[0]}"
        advice = "write a copy without them with `facetrain data check --repair`"
        if skip_bad and len(errors) < len(chosen):
            return warning("images", f"{message}; training skips them (data.bad_records)", advice)
        return failed("images", message, advice if skip_bad else f"{advice}, or set data.bad_records: skip")
    sizes = ", ".join(f"{width} × {height}" for height, width in sorted(shapes)[:3])
    message = f"{len(chosen)} images spread over the dataset were decoded: {sizes} pixels"
    if shapes != {(image_size, image_size)}:
        return warning(
            "images",
            message,
            f"training resizes every image to {image_size} pixels: pack the dataset aligned and in that size",
        )
    return passed("images", message)
