"""Whole photos in a dataset that should have aligned faces, recognized by the shapes of a few images."""

from __future__ import annotations

from facetrain.data.dataset import FaceDataset
from facetrain.data.images.header import ImageHeader, read_header
from facetrain.data.loading.sampler import sample_numbers
from facetrain.errors import UnreadableError

_SAMPLE = 32
_LEAST_RATIO = 1.25
"""Longer by shorter side of a photo; published aligned faces have up to 1.22 (CelebA), cameras from 1.33."""


def describe_photos(source: FaceDataset) -> str | None:
    """Return that a sample has the shapes of photos, and what to do; None for a dataset of faces."""
    numbers = sample_numbers(_SAMPLE, source.num_images).tolist()
    headers = filter(None, (_header(source, number) for number in numbers))
    photos = [one for one in headers if has_photo_shape(one.width, one.height)]
    if not are_photos(len(photos), len(numbers)):
        return None
    return (
        f"{len(photos)} of {len(numbers)} sampled images look like whole photos ({photos[0].width} × "
        f"{photos[0].height} pixels), and a network needs aligned faces: facetrain data pack PHOTOS --output FOLDER "
        "--detector yunet"
    )


def has_photo_shape(width: int, height: int) -> bool:
    """Return whether an image of this size is too far from a square for an aligned face."""
    return max(width, height) >= _LEAST_RATIO * min(width, height)


def are_photos(count: int, num_examined: int) -> bool:
    """Return whether images of which so many look like photos are photos: half of them, because faces differ."""
    return count > 0 and 2 * count >= num_examined


def _header(source: FaceDataset, number: int) -> ImageHeader | None:
    try:
        return read_header(source.read(number))
    except UnreadableError:  # the code that needs the image reports it
        return None
