import re
from datetime import date

import pytest

from facetrain.config.loading import load_config
from facetrain.config.presets import presets
from facetrain.data.published_datasets import published_entry
from facetrain.remote.address import require_supported
from facetrain.remote.catalog import CARD_FOLDER, Entry, catalog, nearest_available


@pytest.mark.parametrize("entry", catalog().values(), ids=lambda entry: entry.name)
def test_an_entry_says_what_it_is_and_how_to_get_it(entry: Entry):
    assert re.fullmatch(r"[a-z0-9_]+", entry.name)
    assert entry.kind in ("detector", "model", "verification set", "training set")
    assert entry.about and entry.terms and entry.state and isinstance(entry.checked, date)
    if entry.address is None:
        assert entry.ask, "says how to ask"
        assert entry.sha256 is None and entry.bytes is None
    else:
        require_supported(entry.address)
        assert not entry.is_withdrawn
    assert entry.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
    assert entry.bytes is None or entry.bytes > 0
    assert entry.nearest is None or nearest_available(entry), "a chain that ends nowhere"
    assert not entry.is_withdrawn or nearest_available(entry)


def test_every_training_set_with_a_card_and_every_preset_is_in_the_catalog():
    cards = {entry.card for entry in catalog().values() if entry.card}
    assert cards <= {path.name.removesuffix(".card.yaml") for path in CARD_FOLDER.glob("*.card.yaml")}
    for preset in presets():
        data = load_config(preset.path).data
        if data.num_images is not None:
            assert published_entry(data.num_classes, data.num_images), preset.name
