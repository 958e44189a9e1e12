import tarfile

import pytest

from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.open_dataset import FORMATS, check_counts, open_dataset
from facetrain.errors import DataError
from tests.support.command import ROOT
from tests.support.datasets import encoded_image, write_records


def test_identity_records_are_not_images(tmp_path):
    dataset = open_dataset(write_records(tmp_path, [0, 0, 1, 2]))
    assert (dataset.num_images, dataset.num_classes) == (4, 3)
    assert dataset.labels.tolist() == [0, 0, 1, 2]
    assert dataset.read(2) == encoded_image(3)
    assert "key 3 at byte" in dataset.location(2)


def test_a_key_range_that_float32_rounded_up_is_corrected(tmp_path):
    # WebFace42M's header says 42,474,560 where it means 42,474,558, and the two keys between are no images.
    first = 42_474_550
    with RecordWriter(tmp_path / "train.rec") as writer:
        writer.write(0, RecordHeader(2, (42_474_558.0, 42_474_560.0)), b"")
        for key in range(first, 42_474_558):
            writer.write(key, RecordHeader(0, (float((key - first) // 4),)), encoded_image(key))
        for key in range(42_474_558, 42_474_560):
            writer.write(key, RecordHeader(2, (float(first), float(first + 4))), b"")
    dataset = open_dataset(tmp_path)
    assert (dataset.num_images, dataset.num_classes) == (8, 2)


def test_a_header_that_announces_too_many_images_is_refused(tmp_path):
    write_records(tmp_path, [0, 0, 1, 1])
    lines = (tmp_path / "train.idx").read_text().splitlines()
    (tmp_path / "train.idx").write_text("\n".join(lines[:3]) + "\n")
    with pytest.raises(DataError, match=r"train\.rec"):
        open_dataset(tmp_path)


def test_a_folder_per_identity_is_a_dataset(tmp_path):
    for name, count in (("b", 2), ("a", 1), (".hidden", 1)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.PNG").write_bytes(encoded_image(number))
    (tmp_path / "a" / "notes.txt").write_text("no image")
    dataset = open_dataset(tmp_path)
    assert (dataset.num_images, dataset.num_classes, dataset.labels.tolist()) == (3, 2, [0, 1, 1])
    few = open_dataset(tmp_path, min_images_per_identity=2)
    assert (few.num_images, few.num_classes, few.labels.tolist()) == (2, 1, [0, 0])
    assert few.location(1).endswith("b/1.PNG") and few.read(1) == encoded_image(1)
    with pytest.raises(DataError, match="the most is 2"):
        open_dataset(tmp_path, min_images_per_identity=3)


@pytest.mark.parametrize(
    ("name", "message"),
    [("jos\N{LATIN SMALL LETTER E WITH ACUTE}", "jos\N{LATIN SMALL LETTER E WITH ACUTE} is written in two ways"),
     ("-1", "the label -1 is negative")],
)  # fmt: skip
@pytest.mark.parametrize("form", ["folder", "tar", "list"])
def test_names_that_are_not_one_person_each_are_refused(tmp_path, form, name, message):
    people = ("jose\N{COMBINING ACUTE ACCENT}", name)
    for person in people:
        (tmp_path / "all" / person).mkdir(parents=True)
        (tmp_path / "all" / person / "1.png").write_bytes(encoded_image(0))
    path = {"folder": tmp_path / "all", "tar": tmp_path / "a.tar", "list": tmp_path / "a.txt"}[form]
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "all", ".")
    (tmp_path / "a.txt").write_text("".join(f"all/{person}/1.png\t{person}\n" for person in people))
    with pytest.raises(DataError, match=message):
        open_dataset(path)


def test_the_files_that_facetrain_writes_into_an_image_folder_are_not_left_out_of_it(tmp_path):
    (tmp_path / "ann").mkdir()
    names = ("landmarks.npy", "landmarks.names.sha256", "dataset_card.yaml", "skipped.csv", "notes.csv")
    for path in (tmp_path / "ann" / "1.png", *(tmp_path / name for name in names)):
        path.touch()
    assert [file.name for file in open_dataset(tmp_path, with_landmarks=False).skipped] == ["notes.csv"]


def test_a_folder_of_the_images_of_a_list_is_refused_with_a_mixture(tmp_path):
    (tmp_path / "mix.yaml").write_text("datasets: [{path: absent}]")
    with pytest.raises(
        DataError, match="--images is the folder of the paths in a list file, and this is none"
    ):
        open_dataset(tmp_path / "mix.yaml", root=tmp_path)


@pytest.mark.parametrize("part", ["backup.tar", "x.tar.gz", "a.parquet", "data.mdb"])
def test_photos_beside_a_part_of_another_dataset_are_not_left_out_silently(tmp_path, part):
    for name in ("ann", "bob"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.JPG").write_bytes(encoded_image(0))
    (tmp_path / part).write_bytes(b"")
    with pytest.raises(DataError, match=f"{part}.* ann, bob"):
        open_dataset(tmp_path)


def test_other_folders_beside_the_parts_of_a_dataset_are_ignored(tmp_path):
    write_records(tmp_path, [0, 1])
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "train.rec", "ann/1.png")
    for name in ("figures/1.png", ".cache/1.png", ".thumbnails/1.png", "eval/lfw/1.png", "logs/1.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encoded_image(0))
    assert open_dataset(tmp_path).num_images == 2
    (tmp_path / "train.rec").unlink()
    assert open_dataset(tmp_path).num_images == 1


def test_a_path_without_a_dataset_is_refused(tmp_path):
    for name, shown in (("is\nmissing", r"is\\nmissing"), ("lfw.bin", r"lfw\.bin")):
        with pytest.raises(DataError, match=f"/{shown}: "):
            open_dataset(tmp_path / name)
    with pytest.raises(DataError, match=str(tmp_path)):
        open_dataset(tmp_path)


def test_folders_of_folders_of_identities_are_refused_with_a_mixture_that_opens(tmp_path):
    for part in "01":
        for person in "ab":
            folder = tmp_path / part / f"{part}{person}"
            folder.mkdir(parents=True)
            (folder / "1.png").write_bytes(encoded_image(ord(person)))
    with pytest.raises(DataError, match=r'if 0, 1 have identities each, .*mixture.*- path: "0"'):
        open_dataset(tmp_path)
    (tmp_path / "all.yaml").write_text('datasets:\n- path: "0"\n- path: "1"\n')
    assert open_dataset(tmp_path / "all.yaml").num_classes == 4


@pytest.mark.parametrize(
    ("files", "part"),
    [(["lfw/ann/1.png", "lfw/bob/1.png", "notes"], "lfw"),
     (["train/ann/1.png", "val/ann/1.png", "classes.txt"], "train"),
     (["Training/ann/1.png", "Test/ann/1.png"], "Training"),
     (["train/train.rec", "validation/train.rec"], "train"),
     (["README.txt", "data/train-00000-of-00001.parquet"], "data"), (["lmdb/data.mdb", "figures/ann/1.png"], "lmdb"),
     (["HSFace10k.lmdb"], "HSFace10k.lmdb"), (["hsface/HSFace10k.lmdb", "masks/1.npy"], "hsface/HSFace10k.lmdb"),
     (["train/ann/1.png", "backup/old.tar"], "train")],
)  # fmt: skip
def test_the_folder_above_the_identities_is_refused_with_the_folder_to_give(tmp_path, files, part):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encoded_image(0))
    with pytest.raises(DataError, match=f"if the identities are in {part}, give {tmp_path}/{part}$"):
        open_dataset(tmp_path)


def test_of_folders_of_test_and_validation_alone_one_is_to_be_given(tmp_path):
    for name in ("test/ann", "val/ann"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "1.png").write_bytes(encoded_image(0))
    with pytest.raises(DataError, match=f"of the splits test, val, give one, such as {tmp_path}/test$"):
        open_dataset(tmp_path)


def test_several_folders_of_training_are_given_as_a_mixture_without_those_of_other_splits(tmp_path):
    for name in ("train_a/ann", "train_b/bob", "val/cy"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "1.png").write_bytes(encoded_image(0))
    with pytest.raises(DataError, match="if train_a, train_b have identities each, give a mixture"):
        open_dataset(tmp_path)


def test_a_zip_archive_is_refused_with_the_command_that_unpacks_it(tmp_path):
    (tmp_path / "my faces.ZIP").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"unzip '.*/my faces\.ZIP'"):
        open_dataset(tmp_path / "my faces.ZIP")


def test_property_may_announce_more_identities_than_labels_but_not_fewer(tmp_path):
    write_records(tmp_path, [0, 2])
    (tmp_path / "property").write_text("5,112,112\n")
    assert open_dataset(tmp_path).num_classes == 5
    (tmp_path / "property").write_text("2,112,112")
    with pytest.raises(DataError, match="2,112,112.* 3 identities"):
        open_dataset(tmp_path)
    for text in ("many", "²,112,112", "1" * 5000):
        (tmp_path / "property").write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=text[:60]):
            open_dataset(tmp_path)


def test_counts_in_the_config_must_agree_with_the_data(tmp_path):
    dataset = open_dataset(write_records(tmp_path, [0, 1]))
    check_counts(dataset, tmp_path, num_classes=2, num_images=None)
    with pytest.raises(DataError, match="data.num_classes.* 3.* 2"):
        check_counts(dataset, tmp_path, num_classes=3, num_images=None)
    with pytest.raises(DataError, match="data.num_images is 1"):
        check_counts(dataset, tmp_path, num_classes=None, num_images=1)
    both = "data.num_classes is 3 and data.num_images is 1, but .* contains 2 and 2; .*classes=null --set data.num_im"
    with pytest.raises(DataError, match=both):
        check_counts(dataset, tmp_path, num_classes=3, num_images=1)


def test_every_format_has_a_row_with_its_names_of_files_in_the_docs():
    table = (ROOT / "docs" / "data.md").read_text().partition("| format |")[2].partition("\n\n")[0]
    rows = {row.split("|")[1].strip(): row.split("|")[2] for row in table.splitlines()[2:]}
    assert [one.name for one in FORMATS] == [name for name in rows if name != "mixture"]
    for one in FORMATS:
        for name in (*one.parts, *one.suffixes):
            assert f"`{name}`" in rows[one.name], f"{one.name}: {name} is not in docs/data.md"
