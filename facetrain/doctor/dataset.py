"""The dataset: that it can be read, and that it is the one that the config means."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from facetrain.data.dataset import FaceDataset
from facetrain.data.decode import decode_rgb
from facetrain.data.open_dataset import check_counts, open_dataset
from facetrain.doctor.check_result import Finding, failure, ok, warning
from facetrain.errors import DataError

_SAMPLES = 32


def check_dataset(
    folder: Path,
    *,
    image_size: int,
    num_classes: int | None = None,
    num_images: int | None = None,
    min_images_per_identity: int = 1,
) -> tuple[list[Finding], FaceDataset]:
    """Open a dataset, count it, and decode some of its images.

    Raises:
        DataError: it cannot be opened, or contradicts the numbers that were given.
    """
    source = open_dataset(folder, min_images_per_identity=min_images_per_identity)
    check_counts(source, folder, num_classes=num_classes, num_images=num_images)
    counts = np.bincount(source.labels, minlength=source.num_classes)
    found = (
        f"{folder}: {source.num_images:,} images of {source.num_classes:,} identities, "
        f"{counts.min():,} to {counts.max():,} of each"
    )
    return [ok("dataset", found), _identities(counts), _samples(source, image_size)], source


def _identities(counts: np.ndarray) -> Finding:
    missing, single = int((counts == 0).sum()), int((counts == 1).sum())
    if missing:
        do = "their centers learn nothing: look at the labels with `facetrain data check`"
        return warning("identities", f"{missing:,} labels below the highest have no image", do)
    if single > len(counts) / 2:
        return warning(
            "identities", f"{single:,} of them have one image", "consider data.min_images_per_identity: 2"
        )
    return ok("identities", f"every label from 0 to {len(counts) - 1:,} has an image")


def _samples(source: FaceDataset, image_size: int) -> Finding:
    chosen = np.unique(np.linspace(0, source.num_images - 1, _SAMPLES).astype(np.int64)).tolist()
    faults, shapes = [], set()
    for number in chosen:
        try:
            shapes.add(decode_rgb(source.read(number), location=source.location(number)).shape[:2])
        except DataError as error:
            faults.append(str(error))
    if faults:
        do = "repair or drop them: `facetrain data check`, or data.bad_records: skip"
        return failure("images", f"{len(faults)} of {len(chosen)} cannot be read; the first: {faults[0]}", do)
    sizes = ", ".join(f"{width} × {height}" for height, width in sorted(shapes)[:3])
    found = f"{len(chosen)} spread over the dataset decode; {sizes} pixels"
    if shapes != {(image_size, image_size)}:
        do = f"they are resized to {image_size} while training: pack them aligned and in that size"
        return warning("images", found, do)
    return ok("images", found)
