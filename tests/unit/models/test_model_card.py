from types import SimpleNamespace

from facetrain.models.model_card import model_card


def card_of(datasets):
    model = SimpleNamespace(
        metadata={"config": {"data": {"train": "mix.yaml"}}, "datasets": datasets},
        preprocessing={"channels": "RGB", "mean": 127.5, "scale": 127.5},
        image_size=112,
        embedding_size=512,
        description="r50",
    )
    return model_card(model, "net", results={})


def test_the_model_card_lists_origin_and_license_of_all_datasets():
    text = card_of([{"name": "HSFace10k", "license": "CC BY-NC 4.0"}, {"name": "ours", "license": "unknown"}])
    assert "- HSFace10k" in text and "license: CC BY-NC 4.0" in text
    assert "- ours" in text and "license: _to be filled in" in text


def test_without_dataset_cards_the_publisher_states_origin_and_terms():
    assert "Origin and terms of the data, and consent of the people: _to be filled in" in card_of([])
