import cv2
import numpy as np
import pytest

from facetrain.data.formats import parquet
from facetrain.data.formats.landmark_file import write_landmarks
from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.open_dataset import open_dataset
from facetrain.data.skipped_files import read_skipped_table
from facetrain.data.tools.check import check
from facetrain.data.tools.inspect import describe_images
from facetrain.data.tools.pack import pack
from facetrain.data.tools.sample_pairs import sample_pairs
from facetrain.embeddings.image_inputs import read_input
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, write_records
from tests.support.memory import traced_peak
from tests.unit.data.tools.helpers import convert, merge, split


def kinds(found):
    return sorted(fault.kind for fault in found.faults)


def messages(found, kind):
    return [fault.message for fault in found.faults if fault.kind == kind]


def write_images(folder, labels, images):
    """Write images without a header record, as im2rec does, but with exact labels."""
    folder.mkdir()
    with RecordWriter(folder / "train.rec") as writer:
        for key, (label, data) in enumerate(zip(labels, images, strict=True)):
            writer.write(key, RecordHeader.of_image(label, key), data)
    return folder


def test_a_good_dataset_has_no_faults(tmp_path):
    found = check(write_records(tmp_path / "data", [0, 0, 1, 2]))
    assert (found.images, found.identities, found.faults, found.damaged) == (4, 3, [], False)


def test_damaged_images_are_listed_and_left_out_of_the_clean_copy(tmp_path):
    labels, images = (0, 0, 2, 2), [encoded_image(number) for number in range(4)]
    images[1], images[2] = b"damaged", images[2][:90]
    found = check(write_images(tmp_path / "data", labels, images), repair=tmp_path / "clean")
    assert found.damaged and kinds(found) == ["empty_identities", "image", "image"]
    assert "key 1" in messages(found, "image")[0] and "key 2" in messages(found, "image")[1]
    clean = open_dataset(tmp_path / "clean")
    assert clean.labels.tolist() == [0, 1]
    assert [clean.read(0), clean.read(1)] == [encoded_image(0), encoded_image(3)]
    assert check(tmp_path / "clean").faults == []
    skipped = read_skipped_table(tmp_path / "clean" / "skipped.csv")
    assert [one[:2] for one in skipped] == [("1", "unreadable"), ("2", "unreadable")]
    assert [one.reason for one in skipped] == messages(found, "image")


@pytest.mark.parametrize("tool", [check, pack])
def test_a_damaged_image_is_left_out_also_if_its_name_cannot_be_read(tmp_path, monkeypatch, tool):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = [{"bytes": encoded_image(number), "path": f"{number}.png"} for number in range(6)]
    (tmp_path / "data").mkdir()
    table = pa.table({"image": column, "label": [0, 0, 0, 1, 1, 1]})
    pq.write_table(table, tmp_path / "data" / "a.parquet", compression="snappy", row_group_size=2)
    open_dataset(tmp_path / "data")  # when the disk was sound
    read_group = parquet._read_group

    def read_damaged(file, group, column):
        if group == 1:
            raise OSError("Input/output error")
        return read_group(file, group, column)

    monkeypatch.setattr(parquet, "_read_group", read_damaged)
    copy = tmp_path / "copy"
    if tool is check:
        check(tmp_path / "data", repair=copy)
    else:
        pack(tmp_path / "data", copy, skip_bad=True)
    assert open_dataset(copy).labels.tolist() == [0, 0, 1, 1]
    assert [one[:2] for one in read_skipped_table(copy / "skipped.csv")] == [
        ("2", "unreadable"), ("3", "unreadable")
    ]  # fmt: skip
    # Of embeddings that leave out images, too.
    assert read_input(tmp_path / "data").names[2] == f"{tmp_path}/data/a.parquet: row group 1, row 0"


def test_equal_images_are_duplicates_in_one_identity_and_conflicting_labels_in_several(tmp_path):
    images = [encoded_image(number) for number in (0, 0, 1, 2, 2, 3)]
    found = check(write_images(tmp_path / "data", (0, 0, 0, 1, 2, 1), images), repair=tmp_path / "clean")
    assert kinds(found) == ["conflicting_labels", "duplicate"] and not found.damaged
    place = open_dataset(tmp_path / "data").location
    assert messages(found, "conflicting_labels") == [
        f"{place(3)} of identity 1: equal to {place(4)} of identity 2"
    ]
    assert open_dataset(tmp_path / "clean").labels.tolist() == [0, 0, 1]
    skipped = read_skipped_table(tmp_path / "clean" / "skipped.csv")
    assert [one[:2] for one in skipped] == [(str(number), "equal") for number in (1, 3, 4)]


def test_one_image_of_each_identity_of_equal_images_is_named(tmp_path):
    labels = [3, 3, 3, 2, *range(4, 9), 2]
    data = write_images(tmp_path / "data", labels, [encoded_image(0)] * len(labels))
    place = open_dataset(data).location
    first, *others = (
        f"{place(n)} of identity {label}" for n, label in enumerate(labels) if n in (0, 3, 4, 5, 6)
    )
    (message,) = messages(check(data), "conflicting_labels")
    assert message == f"{first}: equal to {', '.join(others)} and 5 more"


def test_landmarks_that_do_not_fit_are_a_fault_and_not_in_the_clean_copy(tmp_path):
    data = write_images(tmp_path / "data", (0, 0, 1), [encoded_image(number) for number in range(3)])
    write_landmarks(data / "landmarks.npy", np.zeros((2, 5, 2)))
    found = check(data, repair=tmp_path / "clean")
    assert found.damaged and open_dataset(tmp_path / "clean").num_images == 3
    assert open_dataset(tmp_path / "clean").landmarks is None
    assert "not the landmarks of 3 images" in messages(found, "dataset")[0]


@pytest.mark.parametrize("table", ["names.csv", "identities.csv"])
def test_a_table_of_names_of_another_dataset_is_refused_before_the_images_are_read(tmp_path, table):
    data = write_records(tmp_path / "data", [0, 1])
    (data / table).write_text("number;name\n0;ann\n1;bob\n")
    with pytest.raises(DataError, match=f"{table}: .*does not belong to this train.rec"):
        check(data, progress=lambda *_: pytest.fail("an image was read"))


@pytest.mark.parametrize("tool", [check, pack])
def test_a_copy_of_a_mixture_lists_the_dataset_of_what_it_leaves_out(tmp_path, tool):
    write_images(tmp_path / "damaged", (0, 0), [encoded_image(1), b"damaged"])
    write_images(tmp_path / "repeated", (0, 0), [encoded_image(2)] * 2)
    (tmp_path / "mix.yaml").write_text("datasets: [{path: damaged}, {path: repeated}]")
    if tool is check:
        check(tmp_path / "mix.yaml", repair=tmp_path / "copy")
    else:
        pack(tmp_path / "mix.yaml", tmp_path / "copy", image_size=16, skip_bad=True)
    skipped = [one[:2] for one in read_skipped_table(tmp_path / "copy" / "skipped.csv")]
    equal = [(f"{tmp_path}/repeated/1", "equal")] if tool is check else []
    assert skipped == [(f"{tmp_path}/damaged/1", "unreadable"), *equal]


def test_an_image_that_cannot_be_read_is_listed_and_left_out(tmp_path):
    for number, name in enumerate(("ann/1.png", "ann/2.png", "bob/1.png")):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(encoded_image(number) if number != 1 else b"")
    found = check(tmp_path / "data", repair=tmp_path / "clean")
    assert found.damaged and kinds(found) == ["image"] and "ann/2.png" in messages(found, "image")[0]
    assert open_dataset(tmp_path / "clean").labels.tolist() == [0, 1]


def test_a_damaged_label_that_is_very_large_is_found_without_a_count_of_all_labels(tmp_path):
    data = write_images(
        tmp_path / "data", (0, 1, 2**31 - 200), [encoded_image(number) for number in range(3)]
    )
    with traced_peak() as peak:
        found = check(data)
        statistics = describe_images(open_dataset(data))
    assert peak.bytes < 1 << 28
    assert "identities have no image; the first is 2" in messages(found, "empty_identities")[0]
    assert (statistics["images"], statistics["fewest"], statistics["most"]) == (3, 1, 1)
    assert statistics["identities_without_images"] == statistics["identities"] - 3


def test_no_copy_is_written_if_every_image_has_a_fault(tmp_path):
    data = write_images(tmp_path / "data", [0], [b"damaged"])
    with pytest.raises(DataError, match=r"/data: "):
        check(data, repair=tmp_path / "clean")
    assert not (tmp_path / "clean").exists()
    with pytest.raises(DataError):
        check(tmp_path / "nothing")


def test_identities_that_are_announced_and_have_no_image_are_counted(tmp_path):
    data = write_records(tmp_path / "data", [0, 0, 1])
    (data / "property").write_text("5000000,16,16\n")
    found = check(data)
    assert kinds(found) == ["empty_identities"] and "4,999,998" in messages(found, "empty_identities")[0]


def test_one_identity_is_a_fault(tmp_path):
    assert kinds(check(write_records(tmp_path / "data", [0, 0]))) == ["one_identity"]


def test_a_damaged_card_is_a_fault_because_training_refuses_it(tmp_path):
    data = write_records(tmp_path / "data", [0, 0, 1])
    (data / "dataset_card.yaml").write_text("name: x\nlicence: mine\n")
    assert kinds(check(data)) == ["dataset"]


def test_photos_that_a_list_says_to_align_are_a_fault_and_no_tool_copies_them(tmp_path):
    (tmp_path / "photos").mkdir()
    for number in range(40):
        (tmp_path / "photos" / f"{number}.png").write_bytes(encoded_image(number))
    box_and_points = "\t".join(["0 0 9 9".replace(" ", "\t"), "1\t2\t3\t4\t5\t1\t2\t3\t4\t5"])
    photos = tmp_path / "photos" / "a.lst"
    photos.write_text("".join(f"0\t{n}.png\t{n // 2}\t{box_and_points}\n" for n in range(40)))
    assert [fault.kind for fault in check(photos).faults] == ["dataset"]
    other = write_records(tmp_path / "other", [0, 1])
    for copy in (
        lambda output: check(photos, repair=output),
        lambda output: merge([other, photos], output),
        lambda output: split(photos, output, validation=0.5),
        lambda output: convert(photos, output, "recordio"),
        lambda output: sample_pairs(photos, 20),
    ):
        with pytest.raises(DataError, match="a.lst: 40 images are not aligned"):
            copy(tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("suffix", "options"),
    [(".jpg", [cv2.IMWRITE_JPEG_OPTIMIZE, 1]), (".webp", [cv2.IMWRITE_WEBP_QUALITY, 90])],
)
def test_zeros_in_the_middle_of_an_image_are_damage_and_an_area_of_one_color_is_not(
    tmp_path, suffix, options
):
    def encode(image):
        return bytes(cv2.imencode(suffix, image, options)[1])

    rng = np.random.default_rng(0)
    faces = [cv2.resize(rng.integers(0, 256, (20, 20, 3), np.uint8), (112, 112)) for _ in range(2)]
    flat = np.zeros((1200, 1200, 3), np.uint8)
    flat[:16] = rng.integers(0, 256, (16, 1200, 3), np.uint8)
    images = [encode(face) for face in faces]
    lost = images[0][:1500] + bytes(512) + images[0][2012:]
    assert bytes(128) in encode(flat)[64:]
    found = check(write_images(tmp_path / "data", (0, 0, 1, 1), [lost, *images, encode(flat)]))
    assert kinds(found) == ["image"] and "key 0" in messages(found, "image")[0]


def test_zeros_beside_the_image_of_a_webp_are_no_damage(tmp_path):
    def chunk(kind, content):
        return kind + len(content).to_bytes(4, "little") + content

    rng = np.random.default_rng(0)
    images = []
    for _ in range(2):
        webp = bytes(cv2.imencode(".webp", rng.integers(0, 256, (112, 112, 3), np.uint8))[1])
        has_profile = chunk(b"VP8X", b"\x20\0\0\0" + 2 * (111).to_bytes(3, "little"))
        chunks = b"WEBP" + has_profile + chunk(b"ICCP", bytes(512)) + webp[12:]
        images.append(chunk(b"RIFF", chunks))
    assert check(write_images(tmp_path / "data", (0, 1), images)).faults == []
