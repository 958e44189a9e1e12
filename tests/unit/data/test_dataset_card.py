from dataclasses import replace

import pytest

from facetrain.data.dataset_card import (
    DatasetCard,
    card_path,
    card_text,
    read_card,
    read_cards,
    read_copied_cards,
)
from facetrain.data.tools import pack as pack_tool
from facetrain.data.tools.convert import convert
from facetrain.doctor.check_result import FAILURE, OK, WARNING
from facetrain.doctor.dataset import check_licenses
from facetrain.errors import DataError
from tests.support.datasets import write_records

_CARD = """name: HSFace10k
origin: https://example.org/hsface
license: non-commercial research
consent: synthetic faces
kind: synthetic
"""


def test_pack_and_convert_keep_the_card_and_write_one_digest(tmp_path):
    source = write_records(tmp_path / "in", [1, 0, 1], size=112)
    (source / "dataset_card.yaml").write_text(_CARD)
    convert(source, tmp_path / "a.zip", "zip")
    convert(tmp_path / "a.zip", tmp_path / "b", "webdataset")
    convert(tmp_path / "b", tmp_path / "c", "recordio")
    cards = [read_card(tmp_path / name) for name in ("a.zip", "b", "c")]
    assert cards[0] == cards[1] == cards[2]
    assert (cards[0].license, cards[0].people, cards[0].images) == ("non-commercial research", 2, 3)
    assert cards[0].digest.startswith("sha256:") and len(cards[0].digest) == 71
    write_records(tmp_path / "other", [0, 1, 1], size=112)
    pack_tool.pack(tmp_path / "other", tmp_path / "packed")
    packed = read_card(tmp_path / "packed")
    assert packed.name == "other" and packed.license == "unknown" and packed.digest != cards[0].digest


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
    [("- a", "not a dataset card"), ("name: x\nlicence: y", "unknown key licence"), ("name: [", "expected"),
     ("name: x\npeople: many", "expected a whole number"), ("name: x\nkind: fake", "expected synthetic, real")],
)  # fmt: skip
def test_a_card_with_other_content_is_refused(tmp_path, text, message):
    (tmp_path / "dataset_card.yaml").write_text(text)
    with pytest.raises(DataError, match=message):
        read_card(tmp_path)


@pytest.mark.parametrize(
    ("license", "forbids"),
    [("CC BY-NC 4.0", True), ("CC-BY-NC-SA-4.0", True), ("Non-commercial research", True), ("noncommercial", True),
     ("for research purposes only", True), ("MIT", False), ("CC BY 4.0", False), ("commercial license bought", False)],
)  # fmt: skip
def test_licenses_that_forbid_sale_are_known(license, forbids):
    assert DatasetCard("x", license=license).forbids_sale == forbids


def test_doctor_compares_the_licenses_with_the_use_of_the_model(tmp_path):
    def status(commercial, card):
        card_path(tmp_path).write_text(card_text([card]))
        (result,) = check_licenses(tmp_path, commercial=commercial)
        return result.status

    card = DatasetCard("x", license="CC BY-NC 4.0")
    assert (status(True, card), status(False, card)) == (FAILURE, OK)
    assert (status(True, replace(card, license="MIT")), status(True, DatasetCard("x"))) == (OK, WARNING)
