import csv
import pickle
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from facetrain.data.dataset import SubsetDataset
from facetrain.data.formats.record_names import RecordNames, write_name_tables
from facetrain.data.formats.recordio import write_identities
from facetrain.data.mixture import MixtureDataset
from facetrain.data.open_dataset import open_dataset
from facetrain.data.positional_file import PositionalFile
from facetrain.data.tools.check import check
from facetrain.data.tools.pack import pack
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, write_records
from tests.unit.data.tools.helpers import convert, merge, split, write_cleaned


@pytest.fixture
def photos(tmp_path):
    """A folder with names that are hard for a table: spaces, commas, quotes, accents."""
    number = 0
    for identity, names in {
        "Ann Lee": ["a, b.png", "c.png"],
        "Bö": ['the "best".png', "z.png", "1.png"],
        "007": ["x.png"],
    }.items():
        (tmp_path / "photos" / identity).mkdir(parents=True)
        for name in names:
            (tmp_path / "photos" / identity / name).write_bytes(encoded_image(number, 112))
            number += 1
    return tmp_path / "photos"


def names_of(folder):
    """Return (identity, name) of each image."""
    source = open_dataset(folder)
    return [
        (source.identity_name(label), source.name(number))
        for number, label in enumerate(source.labels.tolist())
    ]


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_packed_dataset_has_the_names_of_its_images_and_identities(photos, tmp_path):
    pack(photos, tmp_path / "out")
    expected = [
        ("007", "007/x.png"), ("Ann Lee", "Ann Lee/a, b.png"), ("Ann Lee", "Ann Lee/c.png"),
        ("Bö", "Bö/1.png"), ("Bö", 'Bö/the "best".png'), ("Bö", "Bö/z.png"),
    ]  # fmt: skip
    assert names_of(photos) == names_of(tmp_path / "out") == expected
    source = pickle.loads(pickle.dumps(open_dataset(tmp_path / "out")))
    assert source.name(1) == "Ann Lee/a, b.png" and "(Ann Lee/a, b.png)" in source.location(1)


def test_every_transformation_keeps_the_names(photos, tmp_path):
    data = tmp_path / "data"
    pack(photos, data)
    expected = sorted(names_of(photos))
    assert sorted(names_of(data)) == expected
    check(data, repair=tmp_path / "repaired")
    assert sorted(names_of(tmp_path / "repaired")) == expected
    split(data, tmp_path / "two", validation=0.4)
    assert (
        sorted(names_of(tmp_path / "two" / "train") + names_of(tmp_path / "two" / "validation")) == expected
    )
    merge([data, shutil.copytree(data, tmp_path / "copy")], tmp_path / "merged")
    assert names_of(tmp_path / "merged") == 2 * names_of(data)
    assert list(open_dataset(tmp_path / "merged").identity_names()) == 2 * ["007", "Ann Lee", "Bö"]


def test_a_cleaned_identity_has_the_name_of_most_of_its_images(photos, tmp_path):
    pack(photos, tmp_path / "data")
    write_cleaned(tmp_path / "data", np.array([-1, 2, 1, 2, 2, 2]), tmp_path / "out")
    assert names_of(tmp_path / "out") == [
        ("Bö", "Ann Lee/a, b.png"), ("Ann Lee", "Ann Lee/c.png"),
        ("Bö", "Bö/1.png"), ("Bö", 'Bö/the "best".png'), ("Bö", "Bö/z.png"),
    ]  # fmt: skip


def test_unpacked_files_have_their_original_names(photos, tmp_path):
    pack(photos, tmp_path / "data")
    convert(tmp_path / "data", tmp_path / "out", "folder")
    names = [name.replace(".png", ".jpg") for name in files_of(photos)]
    assert files_of(tmp_path / "out") == sorted([*names, "dataset_card.yaml"])


def test_names_that_lead_out_of_the_folder_are_changed(photos, tmp_path):
    pack(photos, tmp_path / "data")
    table = (tmp_path / "data" / "names.csv").read_text(encoding="utf-8")
    (tmp_path / "data" / "names.csv").write_text(table.replace("007/x.png", "../../..\\x.png"))
    table = (tmp_path / "data" / "identities.csv").read_text(encoding="utf-8")
    (tmp_path / "data" / "identities.csv").write_text(table.replace("Ann Lee", "../up").replace("007", ".."))
    convert(tmp_path / "data", tmp_path / "out", "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out", "photos"]
    assert {"_../_.._x.jpg", "_.._up/a, b.jpg", "_.._up/c.jpg"} <= set(files_of(tmp_path / "out"))


def test_identities_keep_their_names_if_the_images_have_none(photos, tmp_path):
    pack(photos, tmp_path / "data")
    (tmp_path / "data" / "names.csv").unlink()
    convert(tmp_path / "data", tmp_path / "copied")
    check(tmp_path / "data", repair=tmp_path / "repaired")
    for name in ("copied", "repaired"):
        source = open_dataset(tmp_path / name)
        assert [source.identity_name(label) for label in range(3)] == ["007", "Ann Lee", "Bö"]
        assert source.name(0) is None and not (tmp_path / name / "names.csv").exists()


def test_images_keep_their_names_if_the_first_one_has_none(photos, tmp_path):
    write_records(tmp_path / "plain", [0, 1], size=112)
    merge([tmp_path / "plain", photos], tmp_path / "out")
    assert names_of(tmp_path / "out") == [("plain_0", "0"), ("plain_1", "1"), *names_of(photos)]
    convert(tmp_path / "plain", tmp_path / "nameless")
    assert not list((tmp_path / "nameless").glob("*s.csv"))


@pytest.mark.parametrize("named", [None, 2, 12_500, 99_999])
def test_the_names_of_a_sample_of_images_decide_whether_a_table_is_written(tmp_path, named):
    asked = []

    def image_name(number):
        asked.append(number)
        return "a.jpg" if named is not None and number >= named else None

    source = SimpleNamespace(name=image_name, num_classes=1, has_identity_names=False)
    write_name_tables(tmp_path, np.arange(100_000)[::-1], source, ["0"])
    assert (tmp_path / "names.csv").exists() == (named is not None)
    probed = asked[: -100_000 if named is not None else None]
    assert len(probed) <= 2000 and probed == sorted(set(probed))
    # Also fewer images than are asked for.
    source.name = {5: "b.jpg"}.get
    write_name_tables(tmp_path, np.array([5, 3]), source, ["0"])
    assert (tmp_path / "names.csv").read_text() == "key,name\n1,b.jpg\n2,3\n"


def test_a_table_of_another_dataset_is_refused_and_none_is_needed(photos, tmp_path):
    pack(photos, tmp_path / "data")
    table = (tmp_path / "data" / "names.csv").read_text(encoding="utf-8").splitlines()
    (tmp_path / "data" / "names.csv").write_text("\n".join([table[0], *table[2:], ""]))
    with pytest.raises(DataError, match=r"names\.csv: .*'2,Ann Lee/a, b\.png'.* 1 "):
        open_dataset(tmp_path / "data").name(0)
    assert "key 1" in open_dataset(tmp_path / "data").location(0)
    source = open_dataset(write_records(tmp_path / "plain", [0, 1]))
    assert source.name(0) is None and source.identity_name(1) == "1"


@pytest.mark.parametrize("name", ["names.csv", "identities.csv"])
def test_a_table_that_is_cut_or_too_long_is_refused(photos, tmp_path, name):
    pack(photos, tmp_path / "data")
    path = tmp_path / "data" / name
    table = path.read_bytes()
    following = table.count(b"\n") - (name == "identities.csv")
    for content in [*(table[:size] for size in range(len(table))), table + b"%d,dan\n" % following]:
        path.write_bytes(content)
        source = open_dataset(tmp_path / "data")
        with pytest.raises(DataError, match=rf"{name}: is cut, or does not .*; copy both again, or remove"):
            source.name(0) if name == "names.csv" else source.identity_names()
    with pytest.raises(DataError, match=name):
        convert(tmp_path / "data", tmp_path / "out", "folder")
    path.write_bytes(table)
    assert names_of(tmp_path / "data") == names_of(photos)


def test_tables_with_quotes_around_each_field_are_read(photos, tmp_path):
    pack(photos, tmp_path / "data")
    for name in ("names.csv", "identities.csv"):
        rows = list(csv.reader((tmp_path / "data" / name).read_text(encoding="utf-8").splitlines()))
        with (tmp_path / "data" / name).open("w", encoding="utf-8") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    assert names_of(tmp_path / "data") == names_of(photos)


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_name_is_found_in_any_order_without_the_whole_table(tmp_path, monkeypatch, quote):
    count = 20_000
    expected = [f"{'n' * (key % 90)}/{key}.jpg" for key in range(1, count + 1)]
    lines = [f"{quote}{key}{quote},{quote}{name}{quote}" for key, name in enumerate(expected, 1)]
    table = tmp_path / "names.csv"
    table.write_text("\n".join(["key,name", *lines, ""]))
    arguments = tmp_path, count, range(1)
    names = RecordNames(*arguments)
    assert [names.image(key) for key in range(1, count + 1)] == expected
    for key in np.random.default_rng(0).integers(1, count + 1, 100).tolist():
        assert names.image(key) == expected[key - 1]
    assert names.image(0) is None and names.image(count + 1) is None

    read, bytes_at = [], PositionalFile.bytes_at
    monkeypatch.setattr(
        PositionalFile, "bytes_at", lambda *arguments: read.append(bytes_at(*arguments)) or read[-1]
    )
    assert RecordNames(*arguments).image(count // 2) == expected[count // 2 - 1]
    assert len(set(read)) < 10 < table.stat().st_size / max(map(len, read))

    table.write_text("\n".join(["key,name", *lines[:9000], *lines[9001:], ""]))
    names = RecordNames(*arguments)
    assert names.image(1) == expected[0]
    with pytest.raises(DataError, match=r"names\.csv: .* where 9001 is expected"):
        names.image(9001)


def test_a_long_record_is_read_without_its_name(tmp_path, monkeypatch):
    source = open_dataset(write_records(tmp_path / "data", [0, 1], size=112))
    monkeypatch.setattr(RecordNames, "image", lambda *_: pytest.fail("the name is for messages"))
    assert source.read(0) == encoded_image(1, 112)


def test_a_folder_and_its_tables_belong_to_train_rec_and_not_to_other_files(tmp_path):
    write_identities(tmp_path, [1, 1], [(0, b"image"), (1, b"image")], 112)
    (tmp_path / "names.csv").write_text("key,name\n1,a.png\n2,b.png\n")
    (tmp_path / "property").write_text("9,112,112\n")
    for suffix in (".rec", ".idx"):
        shutil.copyfile(tmp_path / f"train{suffix}", tmp_path / f"other{suffix}")
    found = [open_dataset(tmp_path / name) for name in ("", "train.rec", "other.rec")]
    assert [(each.name(0), each.num_classes) for each in found] == [("a.png", 9), ("a.png", 9), (None, 2)]


def test_the_names_of_the_identities_are_read_without_a_list_of_them(photos, tmp_path):
    pack(photos, tmp_path / "data")
    with (tmp_path / "data" / "property").open("w") as file:
        file.write("5,112,112")
    for path in (photos, tmp_path / "data"):
        source = open_dataset(path)
        names = ["007", "Ann Lee", "Bö", "3", "4"][: source.num_classes]
        assert source.has_identity_names and list(source.identity_names()) == names
        assert "_identities" not in vars(source)
        assert list(SubsetDataset(source, [0, 2]).identity_names()) == ["007", "Bö"]
        mixed = MixtureDataset([SubsetDataset(source, [1]), source], [1, 1])
        assert list(mixed.identity_names()) == ["Ann Lee", *names]


def test_a_list_file_gives_its_paths_and_identities_as_names(photos, tmp_path):
    lines = [f"{path.relative_to(photos)}\t{path.parent.name}" for path in sorted(photos.glob("*/?.png"))]
    (photos / "all.lst").write_text("\n".join(lines), encoding="utf-8")
    pack(photos / "all.lst", tmp_path / "out")
    assert names_of(tmp_path / "out") == [(line.split("/")[0], line.split("\t")[0]) for line in lines]
