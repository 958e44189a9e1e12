import gzip
import io
import json
import pickle
import random
import tarfile

import pytest

from facetrain.data.formats import webdataset
from facetrain.data.formats.labels import number_identities
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, images_of, write_tar


def test_tar_shards_take_identities_from_label_files(tmp_path):
    write_tar(tmp_path / "b.TAR", {"2.png": encoded_image(2), "2.json": json.dumps({"label": 1}).encode()})
    write_tar(
        tmp_path / "a.tar",
        {"0.cls": b"1\n", "0.png": encoded_image(0), "1.png": encoded_image(1), "1.cls": b"0"},
    )
    for _ in range(2):  # the second time from the catalog that was kept
        dataset = open_dataset(tmp_path)
        assert images_of(dataset) == [(1, encoded_image(0)), (0, encoded_image(1)), (1, encoded_image(2))]
    assert dataset.num_classes == 2 and "b.TAR" in dataset.location(2)
    assert images_of(pickle.loads(pickle.dumps(dataset))) == images_of(dataset)


@pytest.mark.parametrize(
    "members",
    [
        {"1.png": b"x"},
        {"1.png": b"x", "1.json": b"{}"},
        {},
        {"a\nb.png": b"x"},
        {"a\nb.png": b"x", "a\nb.cls": b"\xff"},
    ],
)
def test_tar_shards_without_images_or_identities_are_refused(tmp_path, members):
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(DataError) as caught:
        open_dataset(tmp_path)
    assert str(caught.value).isprintable()
    (tmp_path / "a.tar").write_bytes(b"\x1f\x8b nonsense" * 99)
    with pytest.raises(DataError, match=r"a\.tar"):
        open_dataset(tmp_path)


@pytest.mark.parametrize(
    "change",
    [lambda d: d[:3072], lambda d: d[:2800], lambda d: d[:3072] + bytes(512) + d[3584:], lambda d: d + d],
    ids=["cut between two members", "cut", "a header of zeros", "joined"],
)
def test_a_truncated_damaged_or_joined_shard_loses_no_image_in_silence(tmp_path, change):
    write_tar(tmp_path / "a.tar", {f"ann/{n}.png": encoded_image(n) for n in range(4)})
    shard = (tmp_path / "a.tar").read_bytes()
    assert open_dataset(tmp_path).num_images == 4
    (tmp_path / "a.tar").write_bytes(change(shard))
    with pytest.raises(DataError, match=r"a\.tar"):
        open_dataset(tmp_path)
    for zeros in (512, 1024):  # tar fills its last record with them, other programs do not
        (tmp_path / "a.tar").write_bytes(shard[: 6144 + zeros])
        assert open_dataset(tmp_path).num_images == 4


def test_an_image_without_a_label_file_beside_others_is_no_new_identity(tmp_path):
    members = {
        f"ann/{n}.{kind}": data for n in range(4) for kind, data in (("png", encoded_image(n)), ("cls", b"3"))
    }
    write_tar(tmp_path / "a.tar", members)
    assert open_dataset(tmp_path).num_images == 4
    del members["ann/2.cls"]
    write_tar(tmp_path / "a.tar", members)
    place = (tmp_path / "a.tar").read_bytes().find(encoded_image(2))
    with pytest.raises(DataError, match=rf"a\.tar.*1 of 4 images.* at byte {place:,}"):
        open_dataset(tmp_path)


def test_zeros_over_the_last_images_are_an_unfinished_copy(tmp_path):
    write_tar(tmp_path / "a.tar", {f"ann/{n}.png": encoded_image(n, 64) for n in range(4)})
    shard = (tmp_path / "a.tar").read_bytes()
    end = shard.find(encoded_image(3, 64)) - 512
    (tmp_path / "a.tar").write_bytes(shard[:end] + bytes(len(shard) - end))
    with pytest.raises(DataError, match=r"a\.tar"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("label", ["null", "NaN", "0.5", "true", "[1]", '""'])
def test_a_json_label_that_is_no_whole_number_or_text_is_refused(tmp_path, label):
    for name, content in (("1.json", f'{{"label": {label}}}'), ("1.json", f"[{label}]"), ("1.cls", " ")):
        write_tar(tmp_path / "a.tar", {"1.png": encoded_image(0), name: content.encode()})
        with pytest.raises(DataError, match=name):
            open_dataset(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"), [("1.cls", b"-1\n"), ("1.cls", b"-1.0"), ("1.json", b'{"label": -1}')]
)
def test_a_negative_label_is_refused_and_no_identity_of_all_unknown_people(tmp_path, name, content):
    members = {"0.png": encoded_image(0), "0.cls": b"0", "1.png": encoded_image(1), name: content}
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(DataError, match=r"the label -1\S* is negative"):
        open_dataset(tmp_path)


def test_a_number_and_the_same_text_have_one_order_in_every_process():
    identities = [7, "7", *(str(number) for number in range(20)), *range(20)]
    for _ in range(20):
        random.shuffle(identities)
        label_of = dict(zip(identities, number_identities(identities, "x")[0].tolist(), strict=True))
        assert all(label_of[number] + 1 == label_of[str(number)] for number in range(20))


@pytest.mark.parametrize(
    "header", [{"x": "9" * 30}, {"GNU.sparse.map": "one"}, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}]
)
def test_damaged_pax_headers_are_refused(tmp_path, header):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("1.png")
        info.size, info.pax_headers = 3, header
        archive.addfile(info, io.BytesIO(b"x\ny"))
    # The record "36 x=999..." gets a length of 30 digits.
    shard = (tmp_path / "a.tar").read_bytes().replace(b"36 x=" + b"9" * 30, b"9" * 30 + b" x=99")
    (tmp_path / "a.tar").write_bytes(shard)
    with pytest.raises(DataError, match=r"a\.tar"):
        open_dataset(tmp_path)


def test_names_are_those_inside_the_shards_also_long_ones(tmp_path):
    members = {f"set/ann/{'x' * 200}/1.png": encoded_image(0), "./ann/2.png": encoded_image(1)}
    for name, kind in (("a.tar", tarfile.GNU_FORMAT), ("b.tar", tarfile.PAX_FORMAT)):
        with tarfile.open(tmp_path / name, "w", format=kind) as archive:
            for member, content in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    dataset = open_dataset(tmp_path)
    expected = [f"set/ann/{'x' * 200}/1.png", "ann/2.png"]
    assert [dataset.name(n) for n in range(4)] == expected * 2
    assert [dataset.identity_name(n) for n in range(2)] == ["ann", "x" * 200]
    dataset.prefetch(0, 4)


def test_of_shards_of_several_splits_those_of_train_are_read(tmp_path):
    write_tar(tmp_path / "train-000000.tar", {"1.png": encoded_image(1), "1.cls": b"0"})
    assert not open_dataset(tmp_path).skipped
    write_tar(tmp_path / "val-000000.tar", {"2.png": encoded_image(2), "2.cls": b"0"})
    dataset = open_dataset(tmp_path)
    assert images_of(dataset) == [(0, encoded_image(1))]
    assert [(one.name, one.kind) for one in dataset.skipped] == [("val-000000.tar", "split")]


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "A.TGZ"])
def test_a_compressed_shard_is_refused_with_the_command_that_decompresses_it(tmp_path, name):
    write_tar(tmp_path / "b.tar", {"ann/1.png": encoded_image(1)})
    (tmp_path / name).write_bytes(gzip.compress((tmp_path / "b.tar").read_bytes()))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(DataError, match=rf"{name}: .*gunzip .*{name}$"):
            open_dataset(path)


@pytest.mark.parametrize(
    ("first", "last"), [("ann/2019", "bob/2019"), ("train/ann", "val/ann"), ("ann", "ann/thumbs/small")]
)
def test_an_image_whose_folder_may_not_be_an_identity_is_refused(tmp_path, first, last):
    write_tar(tmp_path / "a.tar", {f"{last}/1.png": encoded_image(1)})
    write_tar(tmp_path / "b.tar", {f"{first}/2.png": encoded_image(2), "cy/3.png": encoded_image(3)})
    with pytest.raises(DataError, match=f"({first} and {last}|{last} and {first}) both have images"):
        open_dataset(tmp_path)
    for name, keys in (("a", ["1"]), ("b", ["2", "3"])):  # label files have the identities
        images = {f"{folder}/{key}.png": encoded_image(int(key)) for folder in (first, last) for key in keys}
        labels = {f"{folder}/{key}.cls": key.encode() for folder in (first, last) for key in keys}
        write_tar(tmp_path / f"{name}.tar", images | labels)
    assert open_dataset(tmp_path).num_images == 6


@pytest.mark.parametrize("other", ["x/1.png", "x/1.JPG", "x/1.jpg"])
def test_two_images_with_one_key_are_refused(tmp_path, other):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("x/1.jpg", "x/2.jpg", other):
            info = tarfile.TarInfo(name)
            info.size = 3
            archive.addfile(info, io.BytesIO(b"abc"))
    with pytest.raises(DataError, match=rf"a\.tar: x/1\.jpg and {other}"):
        open_dataset(tmp_path)


def test_members_that_are_not_read_are_listed_as_skipped(tmp_path):
    names = ["bob/photo.2019.jpg", "bob/1.jpg", "bob/1.txt", "bob/2.npy", "bob/._1.jpg"]
    names += ["bob/1.mask.png", "bob/1.large.jpg"]  # beside an image with their key
    names += ["bob/3.cls", "bob/.thumbs/1.jpg", ".Trash/cy/1.jpg"]
    write_tar(tmp_path / "a.tar", {name: encoded_image(0) for name in names})
    with tarfile.open(tmp_path / "a.tar", "a") as archive:
        for name, kind, target in (
            ("ann", tarfile.DIRTYPE, ""),
            ("ann/2.jpg", tarfile.SYMTYPE, "bob/1.jpg"),  # in ann/
            ("ann/3.jpg", tarfile.LNKTYPE, "ann/none.jpg"),
            ("ann/4", tarfile.FIFOTYPE, ""),
            ("ann/5.jpg", tarfile.GNUTYPE_SPARSE, ""),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
    for _ in range(2):  # the second time from the catalog
        dataset = open_dataset(tmp_path)
        assert images_of(dataset) == [(0, encoded_image(0))]
        assert sorted((one.name, one.kind) for one in dataset.skipped) == [
            ("a.tar/.Trash/cy/1.jpg", "hidden"),
            ("a.tar/ann/2.jpg", "special"), ("a.tar/ann/3.jpg", "special"), ("a.tar/ann/4", "special"),
            ("a.tar/ann/5.jpg", "special"),
            ("a.tar/bob/._1.jpg", "hidden"), ("a.tar/bob/.thumbs/1.jpg", "hidden"),
            ("a.tar/bob/2.npy", "suffix"), ("a.tar/bob/3.cls", "suffix"), ("a.tar/bob/photo.2019.jpg", "suffix"),
        ]  # fmt: skip


def test_an_error_about_shards_without_images_names_a_member_that_was_left_out_in_one_line(tmp_path):
    write_tar(tmp_path / "a.tar", {"bob/1.npy\n\x1b[2J": b""})
    with pytest.raises(DataError, match=r"a\.tar/bob/1\.npy") as caught:
        open_dataset(tmp_path)
    assert str(caught.value).isprintable() and str(caught.value).count("1.npy") == 1


def test_hard_links_are_the_files_that_they_are_links_to(tmp_path):
    write_tar(tmp_path / "a.tar", {"./set/1.png": encoded_image(1), "./set/1.cls": b"1"})
    with tarfile.open(tmp_path / "a.tar", "a") as archive:
        for name, target in (("0.png", "1.png"), ("0.cls", "1.cls"), ("2.png", "0.png")):
            info = tarfile.TarInfo(f"./set/{name}")
            info.type, info.linkname = tarfile.LNKTYPE, f"./set/{target}"
            archive.addfile(info)
        info = tarfile.TarInfo("./set/2.cls")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"0"))
    dataset = open_dataset(tmp_path)
    assert images_of(dataset) == [(label, encoded_image(1)) for label in (1, 1, 0)]
    assert [dataset.name(n) for n in range(3)] == ["set/1.png", "set/0.png", "set/2.png"]
    dataset.prefetch(0, 3)


def test_no_members_stay_in_memory_while_a_shard_is_read(tmp_path):
    write_tar(tmp_path / "a.tar", {f"ann/{n}.png": encoded_image(n) for n in range(9)})
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert all(len(archive.members) <= 1 for _ in webdataset._files(archive))


def test_a_folder_that_was_packed_as_a_dot_names_no_identity(tmp_path):
    names = ("./ann/./1.png", "bob//1.png", "/zoe/1.png")
    write_tar(tmp_path / "a.tar", {name: encoded_image(n) for n, name in enumerate(names)})
    dataset = open_dataset(tmp_path)
    assert [dataset.identity_name(n) for n in range(3)] == ["ann", "bob", "zoe"]
    assert [dataset.name(n) for n in range(3)] == ["ann/1.png", "bob/1.png", "zoe/1.png"]
    write_tar(tmp_path / "a.tar", {"./1.png": encoded_image(0)})
    with pytest.raises(DataError, match="image 1"):
        open_dataset(tmp_path)


def test_a_label_file_that_is_too_long_is_refused(tmp_path):
    write_tar(tmp_path / "a.tar", {"ann/1.png": encoded_image(0), "ann/1.cls": b"1" * ((1 << 20) + 1)})
    with pytest.raises(DataError, match=r"ann/1\.cls"):
        open_dataset(tmp_path)


@pytest.mark.parametrize(
    ("members", "names"),
    [
        ({"faces/zoe/1.jpg": None, "faces/ann/1.jpg": None}, ["zoe", "ann"]),
        ({"1.png": None, "1.cls": b"zoe", "2.png": None, "2.json": b'{"identity": " ann "}'}, ["zoe", "ann"]),
        # Numbers in the files, names of the folders.
        ({"zoe/1.png": None, "zoe/1.cls": b"0", "ann/1.png": None, "ann/1.cls": b"1"}, ["zoe", "ann"]),
        # Whole floats and the first label that is not null.
        ({"0.png": None, "0.json": b'{"label": 2.0, "identity": "zoe"}',
          "1.png": None, "1.json": b'{"label": null, "identity": 1}',
          "2.png": None, "2.json": b'{"cls": 0}'}, ["2", "1", "0"]),
        # Numbers that are no labels.
        ({"0.png": None, "0.cls": b"12345678901"}, ["12345678901"]),
        ({"0.png": None, "0.cls": "²".encode()}, ["²"]),
        # 7 and 007 may be two people.
        ({"0.png": None, "0.cls": b"7", "1.png": None, "1.cls": b"007", "2.png": None, "2.cls": b"7"},
         ["7", "007", "7"]),
        ({"0.png": None, "0.cls": b"7", "1.png": None, "1.cls": b"7.0", "2.png": None, "2.cls": b"7."},
         ["7", "7", "7"]),
        # The .cls file counts; the folder is not the folder of one identity.
        ({"set/1.png": None, "set/1.cls": b"1", "set/1.json": b'{"source": "x"}',
          "set/2.json": b'{"label": 0}', "set/2.png": None}, ["1", "0"]),
        # Files that are no labels of images.
        ({"ann/1.jpg": None, "meta.json": b"{}", "bob/1.jpg": None}, ["ann", "bob"]),
        ({"ann/1.jpg": None, "index.json": b'{"label": null}'.ljust(2 << 20), "bob/1.jpg": None}, ["ann", "bob"]),
        ({"ann/1.jpg": None, "ann/1.json": b'{"label": 3}'.ljust((1 << 20) + 1), "bob/1.jpg": None}, ["ann", "bob"]),
        ({"1.jpg": None, "1.json": b'{"label": 3}'.ljust(1 << 20)}, ["3"]),
    ],
)  # fmt: skip
def test_identities_come_from_label_files_or_folders(tmp_path, members, names):
    write_tar(tmp_path / "a.tar", {name: content or encoded_image(0) for name, content in members.items()})
    dataset = open_dataset(tmp_path)
    assert [dataset.identity_name(label) for label in dataset.labels.tolist()] == names
    assert not dataset.skipped
