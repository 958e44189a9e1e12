import numpy as np
import pytest

from facetrain.config.loading import load_config
from facetrain.data import mixture_file
from facetrain.data.dataset_card import (
    card_text,
    read_cards,
    read_copied_cards,
)
from facetrain.data.remote_dataset import ObjectCache
from facetrain.data.tools import pack as pack_tool
from facetrain.data.tools.check import check
from facetrain.errors import DataError
from tests.support.command import ROOT
from tests.support.datasets import write_records
from tests.unit.data.tools import helpers


def read_card(dataset):
    return read_cards(dataset)[0]


_CARD = """name: HSFace10k
origin: https://example.org/hsface
license: non-commercial research
consent: synthetic faces
kind: synthetic
"""


def test_pack_and_convert_keep_the_card_and_write_one_digest(tmp_path):
    source = write_records(tmp_path / "in", [1, 0, 1], size=112)
    (source / "dataset_card.yaml").write_text(_CARD)
    helpers.convert(source, tmp_path / "a", "webdataset")
    helpers.convert(tmp_path / "a", tmp_path / "b", "recordio")
    helpers.convert(tmp_path / "b", tmp_path / "c", "recordio")
    cards = [read_card(tmp_path / name) for name in ("a", "b", "c")]
    assert cards[0] == cards[1] == cards[2]
    assert (cards[0].license, cards[0].people, cards[0].images) == ("non-commercial research", 2, 3)
    assert cards[0].digest.startswith("sha256:") and len(cards[0].digest) == 71
    write_records(tmp_path / "other", [0, 1, 1], size=112)
    pack_tool.pack(tmp_path / "other", tmp_path / "packed")
    packed = read_card(tmp_path / "packed")
    assert packed.name == "other" and packed.license == "unknown" and packed.digest != cards[0].digest


def test_the_card_of_a_folder_is_that_of_the_records_in_it(tmp_path):
    source = write_records(tmp_path / "in", [1, 0, 1], size=112)
    (source / "dataset_card.yaml").write_text(_CARD)
    assert read_card(source / "train.rec").license == "non-commercial research"
    helpers.convert(source / "train.rec", tmp_path / "out")
    assert read_card(tmp_path / "out").license == "non-commercial research"


def test_a_mixture_lists_the_cards_of_all_datasets(tmp_path):
    for name in ("a", "b"):
        write_records(tmp_path / name, [0, 1])
    (tmp_path / "a" / "dataset_card.yaml").write_text(_CARD)
    (tmp_path / "mix.yaml").write_text("datasets:\n  - path: a\n  - path: b\n")
    cards = read_cards(tmp_path / "mix.yaml")
    assert [card.name for card in cards] == ["HSFace10k", "b"]
    (tmp_path / "copy.yaml").write_text(card_text(cards))
    assert [card["name"] for card in read_copied_cards(tmp_path / "copy.yaml")] == ["HSFace10k", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a", "0 is 'a': Input should be a valid dictionary"), ("name: x\nlicence: y", "licence is 'y': Extra inp"),
     ("kind: real", "name is missing"), ("- kind: real", "0.name is missing"),
     ("[]", "the content is .*at least 1 item"),
     ("# none", "the content is None: Input should be a valid dictionary"),
     ("name: x\nlicense: 2.0", "license is 2.0: Input should be a valid string; put the text in quotes"),
     ("name: [", ".*expected"), ("name: x\npeople: many", "people is 'many': Input should be a valid integer"),
     ("name: x\nkind: fake", "kind is 'fake': Input should be 'synthetic', 'real'")],
)  # fmt: skip
def test_a_card_with_other_content_is_refused(tmp_path, text, message):
    (tmp_path / "dataset_card.yaml").write_text(text)
    with pytest.raises(DataError, match=rf"dataset_card\.yaml: {message}"):
        read_card(tmp_path)


def _cards_of(folder):
    return [(card.name, card.license, card.people, card.images) for card in read_cards(folder)]


def test_every_tool_that_writes_a_dataset_carries_origin_and_license(tmp_path):
    source = write_records(tmp_path / "in", [0, 0, 1, 1, 2, 2], size=112)
    (source / "dataset_card.yaml").write_text(_CARD)
    helpers.convert(source, tmp_path / "copied")
    helpers.split(source, tmp_path / "split", validation=0.34)
    helpers.convert(source, tmp_path / "unpacked", "folder")
    check(source, repair=tmp_path / "repaired")
    helpers.write_cleaned(source, np.array([0, 0, 0, 0, -1, 1]), tmp_path / "cleaned")
    expected = {"copied": (3, 6), "split/train": (2, 4), "split/validation": (1, 2),
                "unpacked": (3, 6), "repaired": (3, 6), "cleaned": (2, 5)}  # fmt: skip
    for name, size in expected.items():
        assert _cards_of(tmp_path / name) == [("HSFace10k", "non-commercial research", *size)], name
    digests = [read_card(tmp_path / name).digest for name in ("copied", "repaired", "cleaned")]
    assert digests[0] == digests[1] != digests[2] and all(digest.startswith("sha256:") for digest in digests)


def test_a_merge_lists_the_cards_of_its_sources_and_so_do_copies_of_it(tmp_path):
    sources = [write_records(tmp_path / name, [0, 1], size=112) for name in ("a", "b")]
    (sources[0] / "dataset_card.yaml").write_text(_CARD)
    helpers.merge(sources, tmp_path / "merged")
    helpers.convert(tmp_path / "merged", tmp_path / "copy", "webdataset")
    helpers.convert(tmp_path / "copy", tmp_path / "again")
    for name in ("merged", "copy", "again"):
        names = [(card.name, card.license) for card in read_cards(tmp_path / name)]
        assert names == [("HSFace10k", "non-commercial research"), ("b", "unknown")], name


def test_the_cards_of_public_datasets_load_and_agree_with_the_presets():
    cards = {path.name.removesuffix(".card.yaml"): path for path in (ROOT / "datasets").glob("*.card.yaml")}
    loaded = {name: read_card(path.with_name(name)) for name, path in cards.items()}
    assert len(loaded) > 20 and all(card.kind in ("real", "synthetic") for card in loaded.values())
    pages = {path.stem for path in (ROOT / "datasets").glob("*.md")} - {
        "README",
        "synthetic",
        "hadrian_eclipse",
    }
    assert pages <= set(loaded)
    presets = {path.stem.removesuffix("_r50"): path for path in (ROOT / "configs").glob("*_r50.yaml")}
    for name in loaded.keys() & presets.keys():
        data = load_config(presets[name]).data
        # Not those of DigiFace-1M, whose images its user aligns: some have no face that a detector finds.
        expected = (None, None) if name == "digiface1m" else (loaded[name].people, loaded[name].images)
        assert (data.num_classes, data.num_images) == expected, name
    assert {
        "hsface10k",
        "hsface300k",
        "digiface1m",
        "dcface",
        "arc2face",
        "ms1mv3",
    } <= loaded.keys() & presets.keys()


def test_the_card_of_a_dataset_in_an_object_store_is_that_of_its_local_description(tmp_path, monkeypatch):
    write_records(tmp_path / "described", [0, 1])
    (tmp_path / "described" / "dataset_card.yaml").write_text(_CARD)
    asked = []
    monkeypatch.setattr(
        mixture_file, "dataset_path", lambda *call: asked.append(call) or tmp_path / "described"
    )
    (tmp_path / "mix.yaml").write_text("datasets:\n  - path: s3://bucket/faces\n")
    cache = ObjectCache(tmp_path / "cache", 5)
    assert [card.license for card in read_cards(tmp_path / "mix.yaml", cache)] == ["non-commercial research"]
    assert asked == [("s3://bucket/faces", cache)]
