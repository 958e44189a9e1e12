"""Class centers of people whom another run knows: by name, or by number where names do not say who is who."""

import unicodedata
from pathlib import Path

import pytest

from facetrain.data.open_dataset import open_dataset
from facetrain.errors import ModelError
from facetrain.models.known_identities import Names, choose_centers
from tests.support.datasets import encoded_image, write_records
from tests.support.memory import traced_peak
from tests.unit.data.tools.helpers import merge


def choose(known, names, *, may_grow=True, count=None):
    """Choose centers for `names` among those of `known`; a number stands for so many identities without names."""
    (known, num_known), (names, num_classes) = (
        (None, people) if isinstance(people, int) else (Names.of(people), len(people))
        for people in (known, names)
    )
    choice = choose_centers(Path("runs/o"), known, count or num_known, names, num_classes, may_grow=may_grow)
    return choice.number.tolist(), choice.remark


def test_new_people_shift_no_center_and_removed_ones_are_counted():
    number, remark = choose(["bob", "cleo", "dora"], ["anna", "bob", "dora"])
    assert number == [-1, 0, 2]
    assert remark == "class centers by name: of 2 of 3 identities; 1 new, 1 removed"


def test_people_who_are_the_same_in_another_order_are_kept():
    assert choose(["bob", "cleo"], ["cleo", "bob"], may_grow=False)[0] == [1, 0]


@pytest.mark.parametrize(
    ("names", "fault"), [(["bob", "zoe"], "1 new, 1 removed, such as zoe, cleo; .*extend"), (["bob"], "cleo")]
)
def test_keep_refuses_other_people(names, fault):
    with pytest.raises(ModelError, match=rf"^runs/o: .*{fault}"):
        choose(["bob", "cleo"], names, may_grow=False)


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_names_in_another_form_of_unicode_are_the_same_people(forms):
    known, names = ([unicodedata.normalize(form, name) for name in ("bob", "José", "Zoë")] for form in forms)
    assert choose(known, names, may_grow=False)[0] == [0, 1, 2]


def test_names_that_are_no_unicode_have_digests_of_their_bytes():
    digests = Names(b"Zo\xeb\nZo\xea\nZo\xeb\n").digests()
    assert digests[0] == digests[2] != digests[1]


def test_people_without_names_keep_their_centers_when_another_dataset_of_the_mixture_grows(tmp_path):
    write_records(tmp_path / "plain", [0, 1])
    first, second = (tmp_path / stage / "photos" for stage in ("first", "second"))
    for folder, people in ((first, ["ann", "cleo"]), (second, ["ann", "bob", "cleo"])):
        for person in people:
            (folder / person).mkdir(parents=True)
            (folder / person / "1.png").write_bytes(encoded_image(1))
        merge([folder, tmp_path / "plain"], folder.with_name("merged"))
        mixture = "datasets: [{path: ../plain}, {path: photos}]"
        folder.with_name("mixture.yaml").write_text(mixture)
    for old in ("merged", "mixture.yaml"):
        known = list(open_dataset(first.with_name(old)).identity_names())
        for new in ("merged", "mixture.yaml"):
            names = list(open_dataset(second.with_name(new)).identity_names())
            number, _ = choose(known, names)
            taken = [known[center] if center >= 0 else None for center in number]
            assert taken == [None if name == "bob" else name for name in names]
            assert sorted(names) == ["ann", "bob", "cleo", "plain_0", "plain_1"]


def test_names_of_another_spelling_are_no_new_people():
    with pytest.raises(ModelError, match=r"none .*\(bob, …\).*\(n000001, …\).*reinit"):
        choose(["bob", "cleo"], ["n000001", "n000002"])


@pytest.mark.parametrize(
    ("known", "names", "nameless"),
    [(2, ["a", "b", "c"], "runs/o has"), (["a", "b"], 3, "the dataset has"), (2, 3, "runs/o has")],
)
def test_without_names_the_order_is_assumed_and_said(known, names, nameless):
    number, remark = choose(known, names)
    assert number == [0, 1, -1]
    assert remark.startswith(f"class centers by number; {nameless} no names") and "assumed" in remark


def test_names_that_are_there_twice_must_be_in_the_known_order():
    number, remark = choose(["1", "2", "1"], ["1", "2", "1", "2"])
    assert number == [0, 1, 2, -1] and "agree" in remark
    with pytest.raises(ModelError, match="identity 0 is 1 there and 0 in the dataset, .*reinit"):
        choose(["1", "2", "1"], ["0", "1", "2", "1"])
    with pytest.raises(ModelError, match=r"3 identities.* 2;"):
        choose(["1", "2", "1"], ["1", "2"])


def test_names_that_do_not_belong_to_the_centers_are_damage():
    with pytest.raises(ModelError, match="5 centers, but 2 names"):
        choose(["bob", "cleo"], ["bob"], count=5)


def test_one_name_is_found_without_a_list_of_all():
    names = Names.of(f"person {number}" for number in range(50_000))
    with traced_peak() as peak:
        assert names.name(49_999) == "person 49999" and names.name(0) == "person 0"
    assert peak.bytes < len(names.text) / 10
