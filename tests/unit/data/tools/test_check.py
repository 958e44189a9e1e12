import re
import tracemalloc

import numpy as np
import pytest

from facetrain.data.dataset import image_landmarks
from facetrain.data.formats.landmark_file import write_landmarks
from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.check import check
from facetrain.data.tools.inspect import count_images
from facetrain.errors import DataError
from tests.support.datasets import damage_records, encoded_image, write_records


def kinds(found):
    return sorted(fault.kind for fault in found.faults)


def messages(found, kind):
    return [fault.message for fault in found.faults if fault.kind == kind]


def write_images(folder, labels, images):
    """Write images without a header record, as im2rec does."""
    folder.mkdir()
    with RecordWriter(folder / "train.rec") as writer:
        for key, (label, data) in enumerate(zip(labels, images, strict=True)):
            writer.write(key, RecordHeader(flag=0, labels=(float(label),)), data)
    return folder


def test_a_good_dataset_has_no_faults(tmp_path):
    found = check(write_records(tmp_path / "data", [0, 0, 1, 2]))
    assert (found.images, found.identities, found.faults, found.damaged) == (4, 3, [], False)


def test_damaged_images_and_labels_are_listed_and_left_out_of_the_clean_copy(tmp_path):
    labels, images = (0, 0, -1, 1.5, 2, 2), [encoded_image(number) for number in range(6)]
    images[1], images[4] = b"damaged", images[4][:90]
    found = check(write_images(tmp_path / "data", labels, images), repair=tmp_path / "clean")
    assert found.damaged
    assert kinds(found) == ["dataset", "empty_identities", "image", "image", "label", "label"]
    assert ["key 2" in line for line in messages(found, "label")] == [True, False]
    assert "key 1" in messages(found, "image")[0] and "key 4" in messages(found, "image")[1]
    clean = open_dataset(tmp_path / "clean")
    assert clean.labels.tolist() == [0, 1]
    assert [clean.read(0), clean.read(1)] == [encoded_image(0), encoded_image(5)]
    assert check(tmp_path / "clean").faults == []


def test_equal_images_are_duplicates_in_one_identity_and_conflicting_labels_in_several(tmp_path):
    images = [encoded_image(number) for number in (0, 0, 1, 2, 2, 3)]
    found = check(write_images(tmp_path / "data", (0, 0, 0, 1, 2, 1), images), repair=tmp_path / "clean")
    assert kinds(found) == ["conflicting_labels", "duplicate"] and not found.damaged
    assert "identities 1, 2" in messages(found, "conflicting_labels")[0]
    assert open_dataset(tmp_path / "clean").labels.tolist() == [0, 0, 1]


def test_landmarks_that_do_not_fit_are_a_fault_and_not_in_the_clean_copy(tmp_path):
    data = write_images(tmp_path / "data", (0, 0, 1), [encoded_image(number) for number in range(3)])
    write_landmarks(data / "landmarks.npy", np.zeros((2, 5, 2)))
    found = check(data, repair=tmp_path / "clean")
    assert found.damaged and open_dataset(tmp_path / "clean").num_images == 3
    assert image_landmarks(open_dataset(tmp_path / "clean")) is None
    assert "not the landmarks of 3 images" in messages(found, "dataset")[0]


def test_the_index_finds_records_after_a_damaged_one(tmp_path):
    data = write_records(tmp_path / "data", [0, 0, 1, 1])
    offsets = [int(line.split(b"\t")[1]) for line in (data / "train.idx").read_bytes().splitlines()]
    rec = bytearray((data / "train.rec").read_bytes())
    rec[offsets[2] : offsets[2] + 4] = b"gone"
    (data / "train.rec").write_bytes(rec)
    found = check(data, repair=tmp_path / "clean")
    assert found.images == 3 and found.damaged and "key 2" in messages(found, "record")[1]
    assert open_dataset(tmp_path / "clean").labels.tolist() == [0, 1, 1]


def test_a_scan_finds_records_that_a_wrong_index_lacks(tmp_path):
    data = write_records(tmp_path / "data", [0, 0, 1, 1])
    lines = (data / "train.idx").read_bytes().splitlines(keepends=True)
    (data / "train.idx").write_bytes(b"".join(lines[:3]))
    found = check(data, repair=tmp_path / "clean")
    assert found.images == 4 and "4 of 7 records are not in the index" in messages(found, "index")[0]
    assert open_dataset(tmp_path / "clean").num_images == 4
    (data / "train.idx").write_text("nonsense\n")
    assert check(data).images == 4 and check(data).damaged


def test_records_before_the_end_of_a_truncated_file_are_kept(tmp_path):
    data = write_records(tmp_path / "data", [0, 0, 1, 1])
    whole = (data / "train.rec").read_bytes()
    (data / "train.rec").write_bytes(whole[: len(whole) * 2 // 3])
    found = check(data, repair=tmp_path / "clean")
    assert found.damaged and 0 < found.images < 4
    (past,) = [line for line in messages(found, "record") if "of the index are past the end" in line]
    assert re.search(r"train\.rec: [23] records .* the first of them is key \d at byte", past)
    assert open_dataset(tmp_path / "clean").num_images == found.images


def test_a_record_file_is_checked_like_its_folder(tmp_path):
    data = write_records(tmp_path / "data", [0, 0, 1, 1])
    damage_records(data / "train.rec", (1,))
    whole = (data / "train.rec").read_bytes()
    (data / "train.rec").write_bytes(whole[: len(whole) * 2 // 3])
    found, of_file = check(data), check(data / "train.rec", repair=tmp_path / "clean")
    assert kinds(of_file) == kinds(found) and of_file.images == found.images > 0
    (data / "train.rec").rename(data / "val.rec")
    assert check(data / "val.rec").images == found.images


def test_a_damaged_label_that_is_very_large_is_found_without_a_count_of_all_labels(tmp_path):
    data = write_images(
        tmp_path / "data", (0, 1, 2**31 - 200), [encoded_image(number) for number in range(3)]
    )
    tracemalloc.start()
    found = check(data)
    statistics = count_images(open_dataset(data))
    assert tracemalloc.get_traced_memory()[1] < 1 << 28
    tracemalloc.stop()
    assert "identities have no image; the first is 2" in messages(found, "empty_identities")[0]
    assert (statistics["images"], statistics["fewest"], statistics["most"]) == (3, 1, 1)
    assert statistics["identities_without_images"] == statistics["identities"] - 3


def test_identity_records_that_contradict_the_images_are_a_fault(tmp_path):
    (tmp_path / "data").mkdir()
    with RecordWriter(tmp_path / "data" / "train.rec") as writer:
        writer.write(0, RecordHeader(flag=2, labels=(9.0, 11.0)), b"")
        for key, label in enumerate([0, 0, 1], start=1):
            writer.write(key, RecordHeader.of_image(label, key), encoded_image(key))
    assert "record 0 announces" in messages(check(tmp_path / "data"), "dataset")[0]


def test_no_copy_is_written_if_every_image_has_a_fault(tmp_path):
    data = write_images(tmp_path / "data", [0], [b"damaged"])
    with pytest.raises(DataError, match="every image has a fault"):
        check(data, repair=tmp_path / "clean")
    assert not (tmp_path / "clean").exists()
    with pytest.raises(DataError):
        check(tmp_path / "nothing")
