"""Public datasets that the presets train on, in the catalog."""

from __future__ import annotations

from pathlib import Path

from facetrain.data.settings import DataSettings
from facetrain.errors import DataError
from facetrain.remote.address import is_remote
from facetrain.remote.catalog import Entry, catalog, nearest_available
from facetrain.text import printable, shell_path


def require_dataset(data: DataSettings) -> None:
    """Check that there is a file or folder at the path of the training data.

    The expected numbers of images and identities show which public dataset a published run needs.

    Raises:
        DataError: there is nothing; the message says where to get the dataset and how to give another one.
    """
    if is_remote(data.train) or Path(data.train).exists():
        return
    entry = published_entry(data.num_classes, data.num_images)
    if entry and entry.address:
        source = f"get {entry.about} by `facetrain get {entry.name} --output {shell_path(Path(data.train))}`"
    elif entry:
        source = f"get {entry.about} from {entry.origin} ({entry.state}) and put it there"
        if nearest := nearest_available(entry):
            source += f"; the nearest that can be had: facetrain get {nearest.name}"
    else:
        synth = f"facetrain data synth --output {shell_path(Path(data.train))} --image-size {data.image_size}"
        source = f"correct data.train, or write synthetic faces there by `{synth}`"
    checked = {"num_classes": data.num_classes, "num_images": data.num_images}
    options = ["data.train=FOLDER", *(f"data.{key}=null" for key, number in checked.items() if number)]
    raise DataError(
        f"{printable(data.train)}: no such folder or file; {source}, or give another dataset: facetrain train "
        "--data FOLDER, for other commands " + " ".join(f"--set {option}" for option in options)
    )


def published_entry(num_classes: int | None, num_images: int | None) -> Entry | None:
    """Return the catalog's entry of the public dataset with these numbers; None if there is none."""
    if num_classes is None or num_images is None:
        return None
    training_sets = (entry for entry in catalog().values() if entry.kind == "training set")
    return next(
        (entry for entry in training_sets if (entry.people, entry.images) == (num_classes, num_images)), None
    )
