"""Checks of the dataset: it can be read, and it matches the config."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from facetrain.data.build import open_training_data, training_data_path
from facetrain.data.dataset import FaceDataset, image_landmarks
from facetrain.data.images.decode import decode_rgb
from facetrain.data.label_problems import count_images, find_label_problem, parts_of
from facetrain.data.open_dataset import check_counts, require_landmarks
from facetrain.data.published_datasets import require_dataset
from facetrain.data.settings import DataSettings
from facetrain.doctor.check_result import CheckResult, failed, passed, warned_if, warning
from facetrain.errors import DataError

_SAMPLES = 32


def check_dataset(data: DataSettings) -> tuple[list[CheckResult], FaceDataset]:
    """Open the dataset of a config, count its images and identities, and decode some images.

    Raises:
        DataError: the dataset cannot be opened, or it contradicts the numbers of the config.
    """
    folder, numbers = (
        training_data_path(data),
        {"num_classes": data.num_classes, "num_images": data.num_images},
    )
    # First: for a published dataset, its message says where to get it.
    require_dataset(data)
    source = open_training_data(data)
    check_counts(source, folder, **numbers)
    present, counts = count_images(source)
    fewest = counts.min() if len(present) == source.num_classes else 0
    message = (
        f"{folder}: {source.num_images:,} images of {source.num_classes:,} identities, "
        f"{fewest:,} to {counts.max():,} of each"
    )
    images = _check_images(source, data.image_size, skip_bad=data.bad_records == "skip")
    return [passed("dataset", message), *_check_labels(source, data.train), images], source


def check_landmarks(source: FaceDataset, train: str, backbone: str) -> CheckResult:
    """Check that the images have landmarks, for a backbone that takes them, and count those without a face.

    Raises:
        DataError: there is no landmark file.
    """
    require_landmarks(source, Path(train), backbone)
    landmarks_N52 = image_landmarks(source)
    assert landmarks_N52 is not None
    missing = int(np.isnan(landmarks_N52[:, 0, 0]).sum())
    message = f"{source.num_images - missing:,} of {source.num_images:,} images have landmarks"
    advice = (
        "the others train with the template of an aligned face: check images and detector, and write the landmarks "
        "again with `facetrain data landmarks`"
    )
    return warned_if(missing > source.num_images / 2, "landmarks", message, advice)


def _check_labels(source: FaceDataset, name: str) -> list[CheckResult]:
    """Check the labels of each dataset of a mixture, or of the dataset itself."""
    if len(np.unique(source.labels)) == 1:
        advice = (
            "a head learns from the differences of many: give a folder with a folder of images per person"
        )
        return [failed("identities", f"all images of {name} are of one identity", advice)]
    results = []
    for place, part in parts_of(source, name):
        if (problem := find_label_problem(part)) is not None:
            # Labels from 1 on are a known convention of other tools; from a higher number on, a part may be missing.
            certainty = "certain" if problem.first_label == 1 else "likely"
            if not problem.is_shifted:
                certainty = "possible" if problem.first_label else ""
            message = problem.message if part is source else f"{place}: {problem.message}"
            results.append(warning("identities", message, problem.advice, certainty))
    message = f"every label from 0 to {source.num_classes - 1:,} has an image"
    return results or [passed("identities", message)]


def _check_images(source: FaceDataset, image_size: int, *, skip_bad: bool) -> CheckResult:
    # Spread evenly: damage by a broken download or disk is often in one part of the file.
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
    advice = f"training resizes every image to {image_size} pixels: pack the dataset aligned and in that size"
    return warned_if(shapes != {(image_size, image_size)}, "images", message, advice)
