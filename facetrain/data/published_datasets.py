"""Cards of the public datasets that the presets train on."""

from __future__ import annotations

from pathlib import Path

from facetrain.data.dataset_card import CARD_SUFFIX, DatasetCard, read_card
from facetrain.data.settings import DataSettings
from facetrain.errors import DataError
from facetrain.files import printable, shell_path

# An installed wheel holds the cards beside this module, a source tree holds them in datasets/.
_FOLDERS = (Path(__file__).parent / "published_cards", Path(__file__).parents[2] / "datasets")


def require_dataset(data: DataSettings) -> None:
    """Check that there is a file or folder at the path of the training data.

    The expected numbers of images and identities tell which public dataset a published run needs.

    Raises:
        DataError: there is nothing; the message says where to get the dataset and how to give another one.
    """
    if Path(data.train).exists():
        return
    card = _find_card(data.num_classes, data.num_images)
    if card:
        source = f"download {card.name} from {card.origin} and put it there"
    else:
        synth = f"facetrain data synth --output {shell_path(Path(data.train))} --image-size {data.image_size}"
        source = f"correct data.train, or write synthetic faces there by `{synth}`"
    checked = {"num_classes": data.num_classes, "num_images": data.num_images}
    options = ["data.train=FOLDER", *(f"data.{key}=null" for key, number in checked.items() if number)]
    raise DataError(
        f"{printable(data.train)}: no such folder or file; {source}, or give another dataset: facetrain train "
        "--data FOLDER, for other commands " + " ".join(f"--set {option}" for option in options)
    )


def _find_card(num_classes: int | None, num_images: int | None) -> DatasetCard | None:
    if num_classes is None or num_images is None:
        return None
    for folder in _FOLDERS:
        for path in sorted(folder.glob(f"*{CARD_SUFFIX}")):
            card = read_card(path.with_name(path.name.removesuffix(CARD_SUFFIX)))
            if (card.people, card.images) == (num_classes, num_images):
                return card
    return None
