import re
import tracemalloc

import cv2
import numpy as np
import pytest

from facetrain.data.dataset import image_landmarks
from facetrain.data.formats.landmark_file import write_landmarks
from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.images.decode import decode_rgb, encode_jpeg
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools import near_duplicates
from facetrain.data.tools.check import check
from facetrain.data.tools.inspect import count_images
from facetrain.data.tools.near_duplicates import near_pairs, perceptual_hash
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
    found = check(write_records(tmp_path / "data", [0, 0, 1, 2]), near_duplicates=True)
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


def write_dataset_of(kind, folder, images):
    """Write five images of three identities, as records whose index is not in the order of the file, or in folders."""
    if kind == "records":
        write_images(folder, (0, 0, 1, 1, 2), images)
        lines = (folder / "train.idx").read_text().splitlines()
        (folder / "train.idx").write_text("\n".join(lines[::-1]) + "\n")
        return folder
    for name, image in zip(("a/0.png", "a/1.png", "b/2.png", "b/3.png", "c/4.png"), images, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(image)
    return folder


@pytest.mark.parametrize("kind", ["records", "folder"])
def test_the_clean_copy_has_the_landmarks_of_its_images(tmp_path, kind):
    images = [encoded_image(0), b"damaged", encoded_image(2), encoded_image(2), encoded_image(4)]
    source = open_dataset(data := write_dataset_of(kind, tmp_path / "data", images))
    of_image = {image: np.full((5, 2), 0.1 * (number + 1), np.float32) for number, image in enumerate(images)}
    write_landmarks(data / "landmarks.npy", np.stack([of_image[source.read(n)] for n in range(5)]))
    check(data, repair=tmp_path / "clean")
    clean = open_dataset(tmp_path / "clean")
    landmarks = image_landmarks(clean)
    assert clean.num_images == 3 and landmarks is not None
    for n in range(3):
        np.testing.assert_array_equal(landmarks[n], of_image[clean.read(n)])


@pytest.mark.parametrize("kind", ["records", "folder"])
def test_landmarks_that_do_not_fit_are_a_fault_and_not_in_the_clean_copy(tmp_path, kind):
    data = write_dataset_of(kind, tmp_path / "data", [encoded_image(number) for number in range(5)])
    write_landmarks(data / "landmarks.npy", np.zeros((2, 5, 2)))
    found = check(data, repair=tmp_path / "clean")
    assert found.damaged and open_dataset(tmp_path / "clean").num_images == 5
    assert image_landmarks(open_dataset(tmp_path / "clean")) is None
    assert "not the landmarks of 5 images" in messages(found, "dataset")[0]
    assert "its landmarks are not in the clean copy" in messages(found, "dataset")[1]


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


def test_an_image_that_was_saved_again_is_a_near_duplicate_and_another_image_is_not(tmp_path):
    rng = np.random.default_rng(0)
    drawings = rng.integers(0, 255, (40, 12, 12, 3), np.uint8)
    photos = [cv2.resize(drawing, (96, 96), interpolation=cv2.INTER_CUBIC) for drawing in drawings]
    for number, photo in enumerate(photos):
        (tmp_path / "data" / str(number % 4)).mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / str(number % 4) / f"{number:02d}.jpg").write_bytes(encode_jpeg(photo, 95))
    (tmp_path / "data" / "3" / "again.jpg").write_bytes(encode_jpeg(cv2.resize(photos[8], (80, 80)), 70))
    found = check(tmp_path / "data", near_duplicates=True)
    assert kinds(found) == ["near_duplicate"]
    assert all(name in found.faults[0].message for name in ("08.jpg (identity 0)", "again.jpg (identity 3)"))


def test_near_pairs_are_those_of_an_exhaustive_comparison():
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, (300, 8), dtype=np.uint32)
    for row in range(0, 200, 2):  # a copy with four flipped bits
        bits[row + 1] = bits[row]
        bits[row + 1, rng.choice(8, 4, replace=False)] ^= np.uint32(1) << rng.integers(32, dtype=np.uint32)
    assert near_pairs(bits).tolist() == [[row, row + 1] for row in range(0, 200, 2)]
    assert near_pairs(bits[:1]).shape == (0, 2) and near_pairs(bits[:0]).shape == (0, 2)


def test_the_search_for_near_pairs_needs_less_memory_than_the_hashes(monkeypatch):
    bits = np.random.default_rng(0).integers(0, 2**32, (20_000, 8), dtype=np.uint32)
    bits[1::2] = bits[::2]
    bits[1::2, 0] ^= 1
    monkeypatch.setattr(near_duplicates, "_ROWS_PER_CHUNK", 500)
    assert near_pairs(bits).tolist() == [[row, row + 1] for row in range(0, 20_000, 2)]
    tracemalloc.start()
    assert not len(near_pairs(bits[::2].copy()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * bits[::2].nbytes, "the copy and what the search needs"


def test_the_perceptual_hash_does_not_depend_on_brightness():
    image = decode_rgb(encoded_image(1, 64), location="x") // 2
    assert np.bitwise_count(perceptual_hash(image) ^ perceptual_hash(image + 30)).sum() <= 2
