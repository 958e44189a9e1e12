"""Settings of the training data: dataset, decoding and augmentation (section `data` of the config)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from facetrain.data.formats.names import DATASET_SUFFIXES
from facetrain.remote.address import without_version
from facetrain.settings import (
    ImageSize,
    NotNegative,
    OwnPart,
    PathText,
    Positive,
    Probability,
    Settings,
    Side,
)

CACHE_BYTES = 16 << 30
"""Size of the cache of `s3://` and `gs://` datasets, unless another one is chosen."""
_MOST_CLASSES = 1 << 40
"""More than any mixture has. The bytes of so many class centers are still a number of 64 bits."""
SET_SUFFIXES = (".bin", ".xz")
"""Suffixes of the files of verification sets."""


class OwnAugmentation(OwnPart):
    """List of augmentations of your own, after the others.

    Each is a function f(image, key, **options) of the images that it is drawn for, float32 (S, 3, H, W) from -1 to 1,
    and a random number of each, int64 (S,), which is the same on any number of ranks. It returns images of the same
    shape and dtype, and moves no landmarks.
    """

    probability: Probability = 1.0
    """Probability for an image."""


class AugmentSettings(Settings):
    """Image augmentations with their probabilities from 0 to 1. Each is drawn independently for each image."""

    flip: Probability = 0.5
    """Probability of a horizontal flip."""
    rotation: Probability = 0.0
    """Probability of a rotation by up to 15 degrees."""
    crop: Probability = 0.0
    """Probability of a random crop, enlarged to the full size."""
    crop_in_place: Probability = 0.0
    """Probability of AdaFace's crop: a part of the image stays at its place, the rest is black. AdaFace: 0.2."""
    low_resolution: Probability = 0.0
    """Probability of shrinking the image and enlarging it again."""
    low_resolution_sizes: tuple[Side, ...] = ()
    """Sides in pixels to which `low_resolution` shrinks images, each with the same probability. []: 50, 60, 70 and 80 %
    of the image's side."""
    resample: Probability = 0.0
    """Probability of AdaFace's low resolution: to 20 to 100 % of the side and back, by any interpolations. AdaFace:
    0.2."""
    blur: Probability = 0.0
    """Probability of a Gaussian blur."""
    jpeg: Probability = 0.0
    """Probability of a JPEG compression with a quality of 30 to 95."""
    color: Probability = 0.0
    """Probability of a change of brightness, contrast and saturation by up to 30 %."""
    photometric: Probability = 0.0
    """Probability of AdaFace's change of brightness, contrast and saturation, by factors from 0.5 to 1.5. AdaFace:
    0.2."""
    gray: Probability = 0.0
    """Probability of a conversion to grayscale."""
    erase: Probability = 0.0
    """Probability of random erasing: a rectangle of 2 to 33 % of the area becomes gray."""
    own: tuple[OwnAugmentation, ...] = ()

    def probabilities(self) -> dict[str, float]:
        """Return the probabilities of the files of `augmentations`, in the order in which they are applied."""
        return {name: value for name, value in self if isinstance(value, float) and name != "flip"}


class DataSettings(Settings):
    """Training data."""

    train: PathText
    """Path of the training data: a folder or file in one of the formats of docs/data.md, the YAML file of a mixture of
    datasets, or an address. `s3://` and `gs://` are read in place, see `cache`; others are downloaded."""
    cache: PathText | None = None
    """Folder for the parts of `s3://` and `gs://` datasets that were read last, on a fast disk of each host. null:
    the user's cache folder."""
    cache_bytes: Positive = CACHE_BYTES
    """Largest size of these parts. `shuffle: blocks` needs two windows of 131,072 images each."""
    image_size: ImageSize = 112
    """Width and height of the network input, in pixels."""
    num_classes: Annotated[int, Field(gt=0, le=_MOST_CLASSES)] | None = None
    """Expected number of identities; a run with other data is refused. null: no check. If a number is given, most
    labels may have no images."""
    num_images: Positive | None = None
    """Expected number of images; a run with other data is refused. null: no check."""
    min_images_per_identity: Positive = 1
    """Smallest number of images of an identity; identities with fewer images are left out."""
    workers: NotNegative | Literal["auto"] = "auto"
    """Number of processes per rank that read and decode images. auto: the usable CPU cores divided by the ranks on
    the host, at most 16. 0: no processes, the training process reads."""
    shuffle: Literal["full", "blocks"] = "full"
    """Order of the images. full: a random permutation of all images. blocks: images are read in contiguous blocks
    and shuffled within a window, for slow disks and object stores."""
    bad_records: Literal["error", "skip"] = "error"
    """Action for an image that cannot be read. error: end the run. skip: use the next image instead."""
    max_skipped: NotNegative | None = None
    """Largest number of images that all ranks together may skip with `bad_records: skip`; the run ends if there are
    more. null: no limit."""
    augment: AugmentSettings = AugmentSettings()

    @property
    def is_file(self) -> bool:
        """Whether the data is one file; by its name, if it is an address or not on this machine."""
        train = without_version(self.train)
        return Path(train).is_file() or (
            train.lower().endswith(DATASET_SUFFIXES) and not Path(train).is_dir()
        )
