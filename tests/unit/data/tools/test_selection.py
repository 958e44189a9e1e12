from functools import partial

import numpy as np
import pytest

from facetrain.data.formats.landmark_file import landmarks_path, write_landmarks
from facetrain.data.formats.recordio import RecordReader
from facetrain.data.identity_counts import images_of_large_identities
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.check import check
from facetrain.data.tools.contact_sheet import write_wrong_labels_sheet
from facetrain.data.tools.pack import pack
from facetrain.data.tools.selection import select_all, select_merged, select_parts
from facetrain.data.tools.writing import write_dataset, write_parts
from facetrain.data.tools.wrong_labels import WrongLabel
from facetrain.errors import DataError, ImageError
from tests.support.datasets import encoded_image, write_records
from tests.support.memory import traced_peak
from tests.unit.data.tools.helpers import convert, grouped_images, merge, split, write_cleaned

LABELS = [0, 0, 1, 1, 1, 2, 3, 3, 3, 3]


@pytest.fixture
def data(tmp_path):
    return write_records(tmp_path / "data", LABELS)


def test_merged_datasets_have_the_identities_of_both(data, tmp_path):
    other = write_records(tmp_path / "other", [0, 1, 1])
    written = merge([data, other], tmp_path / "out")
    assert (written.identities, written.images) == (6, 13)
    source = open_dataset(tmp_path / "out")
    assert source.labels.tolist() == [*LABELS, 4, 5, 5]
    assert source.read(11) == open_dataset(other).read(1)
    assert (tmp_path / "out" / "property").read_text() == "6,16,16\n"


def test_a_merged_identity_without_a_name_is_named_by_its_dataset_and_its_number_there(data, tmp_path):
    write_records(tmp_path / "gaps", [0, 2, 5])
    (tmp_path / "gaps.yaml").write_text("datasets: [{path: data}, {path: gaps}]")
    (tmp_path / "photos" / "ann").mkdir(parents=True)
    (tmp_path / "photos" / "ann" / "1.png").write_bytes(encoded_image(1))
    names = [*(f"data_{number}" for number in range(4)), "gaps_0", "gaps_2", "gaps_5"]
    for folders, expected in (
        ([data, tmp_path / "gaps"], names),
        ([tmp_path / "photos", tmp_path / "gaps.yaml"], ["ann", *names]),
    ):
        output = tmp_path / str(len(expected))
        merge(folders, output)
        merge([output, write_records(tmp_path / f"{output.name}_new", [0])], tmp_path / f"{output.name}_more")
        assert list(open_dataset(output).identity_names()) == expected
        more = open_dataset(tmp_path / f"{output.name}_more")
        assert list(more.identity_names()) == [*expected, f"{output.name}_new_0"]


def test_identities_of_one_dataset_are_not_merged_twice(data, tmp_path):
    (tmp_path / "some.txt").write_text("0 1")
    for name, entries in {
        "some": "{path: data, identities: some.txt}",
        "others": "{path: data, without: some.txt}",
        "one": "{path: other}, {path: data, identities: some.txt}",
        "photos": "{path: other}, {path: faces}",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(f"datasets: [{entries}]")
    write_records(tmp_path / "other", [0, 1, 1])
    (tmp_path / "faces" / "ann").mkdir(parents=True)
    (tmp_path / "faces" / "ann" / "1.png").write_bytes(encoded_image(1))
    some, others, one, photos = (tmp_path / f"{name}.yaml" for name in ("some", "others", "one", "photos"))
    for folders in (
        [data, data], [data, tmp_path / "other" / ".." / "data"], [some, data], [one, some],
        [photos, tmp_path / "faces"],
    ):  # fmt: skip
        with pytest.raises(DataError, match=f"{folders[-1]}: is given twice with the same identities"):
            merge(folders, tmp_path / "out")
    assert merge([one, others], tmp_path / "out").identities == 6


def test_landmarks_are_merged_if_all_datasets_have_them(data, tmp_path):
    other = write_records(tmp_path / "other", [0, 1, 1])
    write_landmarks(landmarks_path(data), np.full((len(LABELS), 5, 2), 0.25, np.float32))
    written = merge([data, other], tmp_path / "some")
    assert written.without_landmarks == [str(other)] and not landmarks_path(tmp_path / "some").exists()
    write_landmarks(landmarks_path(other), np.full((3, 5, 2), 0.75, np.float32))
    written = merge([data, other], tmp_path / "all")
    assert not written.without_landmarks
    assert open_dataset(tmp_path / "all").landmarks[:, 0, 0].tolist() == [0.25] * len(LABELS) + [0.75] * 3


@pytest.mark.parametrize(
    ("mixture", "settings"),
    [
        ("datasets: [{path: data}]", []),
        ("datasets: [{path: data, weight: 2}]", ["weight"]),
        (
            "{heads: separate, datasets: [{path: data, margin: {m2: 0.3}, loss_weight: 0.5}]}",
            ["heads", "margin", "loss_weight"],
        ),
    ],
)
def test_the_settings_of_a_mixture_that_a_copy_cannot_have_are_listed(data, tmp_path, mixture, settings):
    (tmp_path / "mixture.yaml").write_text(mixture)
    written = [
        convert(tmp_path / "mixture.yaml", tmp_path / "copy", "recordio"),
        merge([tmp_path / "mixture.yaml", write_records(tmp_path / "other", [0, 1])], tmp_path / "merged"),
        *split(tmp_path / "mixture.yaml", tmp_path / "parts", validation=0.25),
    ]
    assert [one.mixture_settings for one in written] == [settings] * 4


def test_a_split_puts_each_identity_into_exactly_one_dataset(data, tmp_path):
    train, validation = split(data, tmp_path / "out", validation=0.25, seed=3)
    assert (train.identities, validation.identities) == (3, 1)
    assert not train.lost_identities and not validation.lost_identities
    one, other = grouped_images(tmp_path / "out" / "train"), grouped_images(tmp_path / "out" / "validation")
    assert not one & other and one | other == grouped_images(data)


def test_of_corrected_labels_only_an_identity_whose_images_are_left_out_is_lost(data, tmp_path):
    label_N = np.array(LABELS)
    label_N[label_N == 0] = 1  # all of its images show identity 1
    label_N[label_N == 2] = -1
    written = write_cleaned(data, label_N, tmp_path / "out")
    assert written.identities == 2 and len(written.lost_identities) == 1


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0])
def test_a_split_with_an_empty_side_is_refused(data, tmp_path, fraction):
    with pytest.raises(DataError, match="cannot be split"):
        split(data, tmp_path / "out", validation=fraction)


def test_a_failure_leaves_no_files(data, tmp_path):
    def stop(done, total):
        if done == 5:
            raise KeyboardInterrupt

    for number, tool in enumerate((convert, partial(convert, to="folder"))):
        with pytest.raises(KeyboardInterrupt):
            tool(data, tmp_path / f"out{number}", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    with pytest.raises(DataError, match="already exists"):
        convert(data, data)


def test_a_written_dataset_has_the_layout_of_mxnet(data, tmp_path):
    convert(data, tmp_path / "out")
    reader = RecordReader(tmp_path / "out" / "train.rec")
    assert len(list(reader.scan_offsets())) == 1 + 10 + 4
    assert np.frombuffer(reader.read_at(0, 0)[24:32], "<f4").tolist() == [11.0, 15.0]


@pytest.mark.parametrize(
    ("name", "damage", "tools"),
    [
        ("dataset_card.yaml", "licence: mine\n", "pack convert merge split repair"),
        ("landmarks.npy", None, "pack convert merge split"),
        ("names.csv", "key,name\n7,x.png\n", "convert merge split repair"),
    ],
)
def test_what_refuses_a_dataset_does_so_before_the_first_image(name, damage, tools, data, tmp_path):
    if damage is None:
        np.save(data / name, np.full((len(LABELS), 5, 2), 50, np.float32))
    else:
        (data / name).write_text(damage)
    other, done, output = write_records(tmp_path / "other", [0, 1]), [], tmp_path / "out"

    def progress(*_):
        done.append(1)

    def run(tool):
        match tool:
            case "pack":
                pack(data, output, image_size=16, skip_bad=True, checking=progress, progress=progress)
            case "repair":
                check(data, repair=output, progress=(lambda *_: None) if name == "names.csv" else progress)
            case "split":
                write_parts(select_parts(data, validation=0.5, seed=0), output, progress=progress)
            case _:
                selection = select_merged([data, other]) if tool == "merge" else select_all(data)
                write_dataset(selection, output, progress=progress)

    for tool in tools.split():
        with pytest.raises(DataError, match=name):
            run(tool)
        assert not done and not output.exists(), tool


@pytest.mark.parametrize("to", ["recordio", "folder"])
def test_an_empty_image_is_refused_by_its_name(tmp_path, to):
    for number, name in enumerate(["ann/1.png", "ann/2.png", "bob/1.png", "bob/2.png"]):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(encoded_image(number))
    (tmp_path / "in" / "bob" / "1.png").write_bytes(b"")
    with pytest.raises(ImageError, match=r"bob/1\.png: .*--repair"):
        convert(tmp_path / "in", tmp_path / "out", to)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    check(tmp_path / "in", repair=tmp_path / "repaired")
    convert(tmp_path / "repaired", tmp_path / "out", to)


def test_a_very_large_label_needs_little_memory_and_time(tmp_path):
    data, copy = (
        write_records(tmp_path / name, [0, 0, 1, 2**31 - 256, 2**31 - 256]) for name in ("data", "copy")
    )
    with traced_peak() as peak:
        kept = open_dataset(data, min_images_per_identity=2)
        numbers = images_of_large_identities(open_dataset(data), 2)
        merged = merge([data, copy], tmp_path / "merged")
        wrong = WrongLabel(3, 2**31 - 256, 0, 0.5)
        write_wrong_labels_sheet(open_dataset(data), [wrong], tmp_path / "wrong.html")
    assert peak.bytes < 1 << 28
    assert kept.labels.tolist() == [0, 0, 1, 1] and numbers.tolist() == [0, 1, 3, 4]
    assert (merged.identities, merged.images) == (6, 10)
    assert (tmp_path / "wrong.html").read_text().count("<img ") == 4
