import json
import unicodedata
from pathlib import PurePath

import numpy as np
import pytest

from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.open_dataset import open_dataset
from facetrain.data.skipped_files import read_skipped_table
from facetrain.data.tools.check import check
from facetrain.data.tools.writing import FORMATS
from facetrain.errors import DataError, ImageError
from facetrain.text import printable
from tests.support.datasets import encoded_image, images_of, write_records
from tests.unit.data.tools.helpers import convert, merge

ORDERED = [name for name, chosen in FORMATS.items() if chosen.keeps_order]


def converted(source, tmp_path, to):
    if to == "parquet":
        pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    output = tmp_path / f"out_{to}"
    convert(source, output, to, workers=2)
    return output


def write_folder(folder, names):
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded_image(number))
    return folder


def write_named_records(folder, names):
    write_records(folder, [0] * len(names))
    rows = "".join(f"{key},{name}\n" for key, name in enumerate(names, start=1))
    (folder / "names.csv").write_text("key,name\n" + rows)
    return open_dataset(folder)


@pytest.mark.parametrize("to", FORMATS)
def test_a_converted_dataset_has_the_same_images_labels_and_names(tmp_path, to):
    # Identities and names with spaces, dots and umlauts, and equal names in two folders.
    names = ["Ann Lee/1.png", "Ann Lee/a.b.png", "Zoë/1.png", "bob/'x', 2.png", "bob/1.PNG"]
    source = open_dataset(write_folder(tmp_path / "in", names))
    output = open_dataset(converted(tmp_path / "in", tmp_path, to))
    assert images_of(output) == images_of(source)
    names = [source.name(number) for number in range(5)]
    if to == "webdataset":  # whose keys end at the first dot
        names = [name.replace("a.b", "a_b") for name in names]
    assert [output.name(number) for number in range(5)] == names
    assert [output.identity_name(label) for label in range(3)] == ["Ann Lee", "Zoë", "bob"]


@pytest.mark.parametrize("to", ["recordio", "webdataset", "folder"])
def test_a_copy_lists_the_files_that_its_source_leaves_out(tmp_path, to):
    write_folder(tmp_path / "in", ["ann/1.png", "bob/1.png", "bob/old/2.png"])
    (tmp_path / "in/ann/notes.txt").write_text("a note")
    copy = convert(tmp_path / "in", tmp_path / "out", to)
    assert {file.kind for file in copy.skipped} == {"suffix", "nested"}
    assert read_skipped_table(tmp_path / "out/skipped.csv") == copy.skipped == check(tmp_path / "in").skipped
    assert convert(tmp_path / "out", tmp_path / "again", "recordio").skipped == []


def test_merged_folders_list_what_is_left_out_of_each(tmp_path):
    # The second name is no text.
    folders = [write_folder(tmp_path / name, ["ann/1.png", "ann/old/2.png"]) for name in ("a", "b\udcff")]
    left_out = [file.name for file in merge(folders, tmp_path / "out").skipped]
    assert left_out == [printable(f"{folder}/ann/old") for folder in folders]


@pytest.mark.parametrize("to", ORDERED)
def test_images_in_any_order_and_without_names_keep_order_and_labels(tmp_path, to):
    labels = [2, 0, 7, 2, 1, 0, 7]
    write_records(tmp_path / "in", labels)
    output = converted(tmp_path / "in", tmp_path, to)
    dataset = open_dataset(output)
    renumbered = np.searchsorted([0, 1, 2, 7], labels).tolist()
    assert images_of(dataset) == [(label, encoded_image(n + 1)) for n, label in enumerate(renumbered)]
    again = open_dataset(converted(output, tmp_path / "again", "recordio"))
    assert images_of(again) == images_of(dataset)
    assert not check(output).faults


def test_a_flipped_bit_in_a_label_of_a_converted_parquet_file_is_noticed(tmp_path):
    write_folder(tmp_path / "in", ["ann/1.png", "bob/1.png", "bob/2.png"])
    (path,) = converted(tmp_path / "in", tmp_path, "parquet").glob("*.parquet")
    content = bytearray(path.read_bytes())
    content[content.index(np.int64([0, 1, 1]).tobytes()) + 8] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"\.parquet: .*checksum.*: copy it again$"):
        open_dataset(path.parent)


def test_several_shards_and_equal_names_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr("facetrain.data.formats.image_writers._TAR_IMAGES", 3)
    (tmp_path / "names.csv").write_text("key,name\n" + "".join(f"{n},x/1.png\n" for n in range(1, 8)))
    write_records(tmp_path, [0, 0, 0, 1, 1, 1, 1])
    output = converted(tmp_path, tmp_path / "new", "webdataset")
    assert images_of(open_dataset(output)) == images_of(open_dataset(tmp_path))
    assert sorted(one.name for one in output.glob("*.tar")) == ["000000.tar", "000001.tar", "000002.tar"]


@pytest.mark.parametrize(
    "names",
    [
        ["q.1.jpg", "q_1.jpg", "q_1.png", "q_1.JPG"],
        ["IMG_1.jpg", "IMG_1.png", "img_1.PNG"],
        ["1_2.jpg", "1.jpg", "1.jpg", "2.jpg"],
        ["1.jpg", "1.jpg", "1_1.jpg", "1_1_1.jpg", "1_3.jpg"],
        ["q", "q.png", "q.data", "q.data.png"],
    ],
)
def test_no_image_takes_the_name_of_another_one(tmp_path, names):
    source = write_named_records(tmp_path, names)
    dataset = open_dataset(converted(tmp_path, tmp_path, "webdataset"))
    assert images_of(dataset) == images_of(source)
    written = [PurePath(dataset.name(number)) for number in range(len(names))]
    # A key of a shard has no suffix.
    assert len({str(name.with_suffix("")) for name in written}) == len(names)
    assert [name.suffix for name in written] == [
        PurePath(name).suffix.replace(".data", "") or ".png" for name in names
    ]


@pytest.mark.parametrize("to", ["webdataset", "folder"])
def test_identities_named_by_numbers_keep_their_names(tmp_path, to):
    names = sorted(str(number) for number in range(12))
    source = open_dataset(write_folder(tmp_path / "in", [f"{name}/a.png" for name in names]))
    dataset = open_dataset(converted(tmp_path / "in", tmp_path, to))
    assert images_of(dataset) == images_of(source)
    assert [dataset.identity_name(label) for label in range(12)] == names


@pytest.mark.parametrize("to", ORDERED)
@pytest.mark.parametrize(("labels", "names"), [(range(11), None), ([0, 5, 10], ["0", "5", "10"])])
def test_identities_without_names_get_them_only_if_their_numbers_change(tmp_path, to, labels, names):
    write_records(tmp_path / "in", labels)
    found = open_dataset(converted(tmp_path / "in", tmp_path, to)).identity_names()
    assert (found and list(found)) == names


def test_identities_that_differ_in_case_keep_their_names_in_shards(tmp_path):
    source = open_dataset(write_folder(tmp_path / "in", ["Ann/1.png", "ann/1.png"]))
    dataset = open_dataset(converted(tmp_path / "in", tmp_path, "webdataset"))
    assert images_of(dataset) == images_of(source)
    assert [dataset.identity_name(label) for label in range(2)] == ["Ann", "ann"]


def test_names_with_outer_white_space_are_found_again_in_shards(tmp_path):
    source = open_dataset(write_folder(tmp_path / "in", [" ann/ 1.png", "\u3000bob/ 1.png", "cid / 1.png"]))
    dataset = open_dataset(converted(tmp_path / "in", tmp_path, "webdataset"))
    assert images_of(dataset) == images_of(source)
    assert sorted(map(dataset.name, range(3))) == ["_ann/_1.png", "_bob/_1.png", "cid_/_1.png"]


def write_people(tmp_path):
    lists = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in lists:
        path.write_text("1.png\tann\n2.png\tbob\n")
    for number in (1, 2):
        (tmp_path / f"{number}.png").write_bytes(encoded_image(number))
    merge(lists, tmp_path / "twice")
    return lists[0], tmp_path / "twice"


def test_a_converted_dataset_says_if_its_folders_have_another_order(tmp_path):
    once, twice = write_people(tmp_path)
    assert not convert(once, tmp_path / "ordered", "folder").is_reordered
    assert convert(twice, tmp_path / "folders", "folder").is_reordered
    assert not convert(twice, tmp_path / "records").is_reordered
    names = [open_dataset(tmp_path / "folders").identity_name(label) for label in range(4)]
    assert names == ["ann", "ann_2", "bob", "bob_3"]


def test_identities_of_one_name_have_two_in_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    convert(write_people(tmp_path)[1], tmp_path / "shards", "parquet")
    (shard,) = (tmp_path / "shards").glob("*.parquet")
    metadata = parquet.read_metadata(shard).metadata
    assert list(metadata) == [b"huggingface"], "the names are there once"
    described = json.loads(metadata[b"huggingface"])
    assert described["info"]["features"]["label"]["names"] == ["ann", "bob", "ann_2", "bob_3"]


@pytest.mark.parametrize("to", ["folder", "webdataset", "parquet"])
def test_identities_whose_names_differ_only_in_the_form_of_unicode_have_two(tmp_path, to):
    forms = ("NFC", "NFD")
    write_folder(tmp_path, [f"{form}/{unicodedata.normalize(form, 'José')}/a.png" for form in forms])
    merge([tmp_path / form for form in forms], tmp_path / "merged")
    dataset = open_dataset(converted(tmp_path / "merged", tmp_path, to))
    names = [unicodedata.normalize("NFC", dataset.identity_name(label)) for label in range(2)]
    assert sorted(names) == ["José", "José_1"]


@pytest.mark.parametrize("to", FORMATS)
def test_a_negative_number_as_name_is_refused_where_readers_would_refuse_it(tmp_path, to):
    write_records(tmp_path / "in", [0, 1])
    (tmp_path / "in" / "identities.csv").write_text("identity,name\n0,-1\n1,bob\n")
    if to in ("folder", "parquet"):
        with pytest.raises(DataError, match=r"out_.*: the label -1 is negative"):
            converted(tmp_path / "in", tmp_path, to)
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
    else:
        assert open_dataset(converted(tmp_path / "in", tmp_path, to)).identity_name(0) == "-1"


def test_no_file_or_folder_takes_the_name_of_another_one(tmp_path):
    places = ["d1/1_2.jpg\tann", "d1/1.jpg\tann", "d2/1.jpg\tann", "d2/1_3.jpg\tann", "d2/2.jpg\tbob", "d2/3.jpg\tBob",
              "d2/4.jpg\tbob_1"]  # fmt: skip
    write_folder(tmp_path, [line.partition("\t")[0] for line in places])
    (tmp_path / "l.txt").write_text("\n".join(places) + "\n")
    assert convert(tmp_path / "l.txt", tmp_path / "out", "folder").images == 7
    assert sorted(one for _, one in images_of(open_dataset(tmp_path / "out"))) == sorted(
        map(encoded_image, range(7))
    )
    folders = {path.name.lower() for path in (tmp_path / "out").iterdir()}
    assert folders == {"ann", "bob", "bob_1", "bob_2", "dataset_card.yaml"}
    assert (tmp_path / "out" / "ann" / "1_2.png").read_bytes() == encoded_image(0)


def test_images_in_shards_keep_their_names_if_those_of_others_differ_only_in_case(tmp_path):
    names = ["ann/1.png", "Ann/1.png", "Ann/A.png", "Ann/a.png"]
    write_folder(tmp_path / "in", names)
    convert(tmp_path / "in", tmp_path / "out", "webdataset")
    shards = open_dataset(tmp_path / "out")
    assert {shards.name(number) for number in range(4)} == set(names)


def test_names_that_are_too_long_for_a_file_system_are_cut_and_stay_apart(tmp_path):
    records = write_named_records(tmp_path / "in", [f"1/{'ä' * 150}{end}.png" for end in "ab"])
    (tmp_path / "in" / "identities.csv").write_text(f"label,name\n0,{'x' * 300}\n")
    assert convert(tmp_path / "in", tmp_path / "out", "folder").images == 2
    first, second = sorted((tmp_path / "out" / ("x" * 230)).iterdir())
    assert (first.name, second.name) == ("ä" * 115 + ".png", "ä" * 115 + "_1.png")
    assert first.read_bytes() == records.read(0)


@pytest.mark.parametrize("to", ["folder", "webdataset"])
def test_bytes_without_a_format_are_written_only_under_the_name_of_an_image(tmp_path, to):
    with RecordWriter(tmp_path / "train.rec") as writer:
        for key in range(1, 4):
            data = b"no image" if key == 2 else encoded_image(key)
            writer.write(key, RecordHeader.of_image(0, key), data)
    source = open_dataset(tmp_path / "train.rec")
    with pytest.raises(ImageError, match=r"key 2 at byte .*--repair"):
        convert(tmp_path / "train.rec", tmp_path / "out", to)
    assert not [path.name for path in tmp_path.iterdir() if "out" in path.name]
    (tmp_path / "names.csv").write_text("key,name\n1,a.png\n2,b.JPG\n3,c.png\n")
    convert(tmp_path / "train.rec", tmp_path / "out", to)
    written = open_dataset(tmp_path / "out")
    assert images_of(written) == images_of(source)
    assert [PurePath(written.name(number)).name for number in range(3)] == ["a.png", "b.JPG", "c.png"]
