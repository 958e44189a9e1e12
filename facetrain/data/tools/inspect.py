"""Statistics of a dataset: identities, images per identity, image sizes and formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from facetrain.data.dataset import FaceDataset
from facetrain.data.identity_counts import count_images
from facetrain.data.images.decode import NotAnImageError, decode
from facetrain.data.images.header import read_header
from facetrain.data.loading.sampler import sample_numbers

_SAMPLE = 1000
"""Images whose headers are read."""
_LISTED = 5
"""Sizes and formats that are listed, the most frequent ones."""


def describe_images(source: FaceDataset) -> dict[str, Any]:
    """Return the numbers of images and identities, and the sizes and formats of a random sample of the images.

    `fewest`, `median` and `most` are images per identity, of identities with images. The rest is as in `count_formats`.

    Raises:
        DataError: an image cannot be read.
    """
    _, present = count_images(source)
    numbers = sample_numbers(_SAMPLE, source.num_images)
    return {
        "images": source.num_images,
        "identities": source.num_classes,
        "identities_without_images": source.num_classes - len(present),
        "fewest": int(present.min()),
        "median": float(np.median(present)),
        "most": int(present.max()),
        "sample": len(numbers),
        **count_formats([source.read(number) for number in numbers.tolist()]),
    }


def count_formats(images: Sequence[bytes]) -> dict[str, Any]:
    """Return the five most frequent `sizes`, such as "112×112", and `formats` of images, with their counts.

    `unreadable` says why the first image without either has none; it is absent if all have both.
    """
    headers = [read_header(image) for image in images]
    sizes = Counter(f"{one.width}×{one.height}" if one else "unreadable" for one in headers)
    formats = Counter(one.format if one else "unknown" for one in headers)
    counts: dict[str, Any] = {
        "sizes": dict(sizes.most_common(_LISTED)),
        "formats": dict(formats.most_common(_LISTED)),
    }
    if None in headers:
        try:
            decode(images[headers.index(None)])
        except NotAnImageError as error:
            counts["unreadable"] = str(error)
    return counts
