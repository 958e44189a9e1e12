import io
import pickle
import struct
import zipfile

import pytest

from facetrain.data.dataset import identity_name, original_name, skipped_files
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, images_of
from tests.unit.data.tools.helpers import convert


def write_zip(path, members, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_archive_is_read_as_the_folder_that_it_contains(tmp_path, method):
    names = ["faces/zoe/b.png", "faces/zoe/a.png", "faces/ann/1.png", "faces/10/1.png", "faces/2/1.png"]
    members = {name: encoded_image(n) for n, name in enumerate(names)}
    for name, data in members.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    folder = open_dataset(tmp_path / "faces")
    path = write_zip(tmp_path / "a.zip", members, method)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"faces"
    path.write_bytes(path.read_bytes() + bytes(9))  # as some programs pad archives
    for _ in range(2):  # the second time from the catalog
        dataset = open_dataset(path)
        assert images_of(dataset) == images_of(folder)
        assert [dataset.name(n) for n in range(5)] == [folder.name(n) for n in range(5)]
        assert [identity_name(dataset, n) for n in range(4)] == ["10", "2", "ann", "zoe"]
    assert images_of(pickle.loads(pickle.dumps(dataset))) == images_of(folder)
    assert dataset.location(0).startswith(f"{path}: member at byte ") and "(10/1.png)" in dataset.location(0)
    dataset.prefetch(0, 5)


def test_other_members_of_a_zip_archive_are_listed_as_skipped(tmp_path):
    members = {"ann/1.png": encoded_image(0), "__MACOSX/ann/._1.png": b"x", "read.me": b"", "top.png": b"x"}
    for _ in range(2):
        dataset = open_dataset(write_zip(tmp_path / "a.zip", members))
        assert sorted((one.name, one.kind) for one in skipped_files(dataset)) == [
            ("__MACOSX/ann/._1.png", "hidden"), ("read.me", "suffix"), ("top.png", "no_identity"),
        ]  # fmt: skip


def test_a_list_in_a_zip_archive_gives_the_images_their_order_and_identities(tmp_path):
    members = {f"set/{n}.png": encoded_image(n) for n in range(3)}
    path = write_zip(tmp_path / "a.zip", {**members, "set/labels.csv": "path,label\n2.png,1\n0.png,4\n"})
    dataset = open_dataset(path)
    assert images_of(dataset) == [(1, encoded_image(2)), (4, encoded_image(0))]
    assert dataset.num_classes == 5 and identity_name(dataset, 0) == "0"
    assert [one.name for one in skipped_files(dataset)] == ["set/1.png"]
    assert [identity_name(dataset, n) for n in (1, 4)] == ["1", "4"]  # their common folder names none of them
    write_zip(path, {**members, "set/labels.csv": "9.png,1\n"})
    with pytest.raises(DataError, match=r"labels\.csv: the archive has no image set/9\.png"):
        open_dataset(path)


def test_paths_that_begin_with_a_dot_and_a_slash_are_not_hidden(tmp_path):
    members = {"./ann/1.png": encoded_image(0), "./bob/1.png": encoded_image(1)}
    dataset = open_dataset(write_zip(tmp_path / "a.zip", members))
    assert images_of(dataset) == [(0, encoded_image(0)), (1, encoded_image(1))] and not skipped_files(dataset)
    assert [dataset.name(n) for n in range(2)] == ["ann/1.png", "bob/1.png"]
    assert [identity_name(dataset, n) for n in range(2)] == ["ann", "bob"]
    write_zip(tmp_path / "b.zip", members | {"./labels.csv": "./bob/1.png,0\nann/1.png,1\n"})
    assert images_of(open_dataset(tmp_path / "b.zip")) == [(0, encoded_image(1)), (1, encoded_image(0))]


def test_a_zip64_archive_is_read(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive, archive.open("p/1.png", "w", force_zip64=True) as member:
        member.write(encoded_image(1))
    data = path.read_bytes()
    entry, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
    directory = bytearray(data[entry:end])
    # The sizes and the offset move to the extra field; the end record points to its 64-bit form.
    size = len(encoded_image(1))
    directory[20:28], directory[42:46] = b"\xff" * 8, b"\xff" * 4
    directory[30:32] = struct.pack("<H", 28)
    directory += struct.pack("<HHQQQ", 1, 24, size, size, 0)
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(directory), entry)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, entry + len(directory), 1)
    last = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(data[:entry] + directory + end64 + locator + last)
    dataset = open_dataset(path)
    assert images_of(dataset) == [(0, encoded_image(1))] and original_name(dataset, 0) == "p/1.png"


def test_all_tools_read_a_zip_archive_through_the_same_interface(tmp_path):
    path = write_zip(tmp_path / "a.zip", {f"p{n % 2}/{n}.png": encoded_image(n) for n in range(6)})
    convert(path, tmp_path / "out", "folder", workers=1)
    assert images_of(open_dataset(tmp_path / "out")) == images_of(open_dataset(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda d: d.replace(struct.pack("<H", 8), struct.pack("<H", 99)), "the unknown method 99")],
)  # fmt: skip
def test_a_damaged_zip_archive_is_refused(tmp_path, change, message):
    path = write_zip(tmp_path / "a.zip", {"p/1.png": bytes(99_999)}, zipfile.ZIP_DEFLATED)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        open_dataset(path)


def test_a_damaged_member_is_an_error_of_this_image_only(tmp_path):
    path = write_zip(tmp_path / "a.zip", {f"p/{n}.png": encoded_image(n) for n in range(2)})
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    dataset = open_dataset(path)
    with pytest.raises(DataError, match=r"p/0\.png\): the member is damaged"):
        dataset.read(0)
    assert dataset.read(1) == encoded_image(1)


def test_a_member_that_claims_too_many_bytes_is_refused_without_reading_it(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("p/1.png", bytes(200 << 20))
    (tmp_path / "a.zip").write_bytes(buffer.getvalue())
    with pytest.raises(DataError, match="claims 209,715,200 bytes; the limit"):
        open_dataset(tmp_path / "a.zip")


def test_an_encrypted_member_is_refused(tmp_path):
    path = write_zip(tmp_path / "a.zip", {"p/1.png": b"x"})
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="encrypted"):
        open_dataset(path)
