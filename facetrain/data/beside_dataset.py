"""Names and paths of the files that describe a dataset, such as its landmarks and its card, beside its images."""

from __future__ import annotations

from pathlib import Path

from facetrain.remote.catalog import CARD_SUFFIX

TRAINING_SET = "train.rec"
"""Images of InsightFace's training sets, which are folders: the other files of the folder describe them."""
PROPERTY_FILE = "property"
"""Number of identities and size of the images of a training set."""
NAMES_FILE, IDENTITIES_FILE = "names.csv", "identities.csv"
"""Names of the images and identities of a training set."""
LANDMARKS_FILE, LANDMARKS_SUFFIX = "landmarks.npy", ".landmarks.npy"
FILE_NAMES_SUFFIX = ".names.sha256"
"""What takes the place of the suffix of a landmark file, for the digest of the names of an image folder's files."""
CARD_FILE = "dataset_card.yaml"
SKIPPED_TABLE = "skipped.csv"
"""Files that a tool has left out of the dataset that it wrote."""
DESCRIBING_FILES = (PROPERTY_FILE, NAMES_FILE, IDENTITIES_FILE, LANDMARKS_FILE, CARD_FILE)
"""Names in the folder of a dataset."""
BESIDE_IDENTITIES = (
    LANDMARKS_FILE,
    Path(LANDMARKS_FILE).with_suffix(FILE_NAMES_SUFFIX).name,
    CARD_FILE,
    SKIPPED_TABLE,
)
"""Names in an image folder, which facetrain writes."""
DESCRIBING_SUFFIXES = (LANDMARKS_SUFFIX, CARD_SUFFIX)
"""What follows the name of a dataset in one file."""


def beside(dataset: Path, name: str, suffix: str) -> Path:
    """Return FOLDER/name of a folder, which a train.rec stands for, and FILE + suffix of another dataset in a file."""
    if dataset.is_dir():
        return dataset / name
    return dataset.with_name(name if dataset.name == TRAINING_SET else dataset.name + suffix)
