import mmap
import os
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from facetrain.data.formats import recordio
from facetrain.data.formats.record_dataset import open_records
from facetrain.data.formats.record_index import build_catalog, read_index
from facetrain.data.formats.recordio import (
    EXACT_LABEL,
    KIND_SHIFT,
    MAGIC,
    RecordHeader,
    RecordReader,
    RecordWriter,
    decode_record,
    write_identities,
)
from facetrain.data.images import header
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError, RecordError
from tests.support.datasets import images_of, write_records

_MAGIC = struct.pack("<I", MAGIC)


def write(path, payloads):
    with RecordWriter(path) as writer:
        for key, payload in enumerate(payloads):
            writer.write(key, RecordHeader.of_image(key, key), payload)
    return path


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([_MAGIC, b"a", b"bcd", b"\x00" * 4]), max_size=6).map(b"".join), max_size=4
    )
)
def test_every_payload_is_read_as_it_was_written(tmp_path_factory, payloads):
    path = write(tmp_path_factory.mktemp("rec") / "a.rec", payloads)
    reader = RecordReader(path)
    found = [decode_record(reader.read_at(offset), "") for offset in reader.scan_offsets()]
    assert [(header.label, image) for header, image in found] == list(enumerate(payloads))


def test_labels_past_two_to_the_24_are_exact(tmp_path):
    labels = [2**24 + 1, 2**31 - 1, 16_777_219]
    with RecordWriter(tmp_path / "train.rec") as writer:
        for key, label in enumerate(labels):
            writer.write(key, RecordHeader.of_image(label, key), b"image")
    assert open_records(tmp_path).labels.tolist() == labels


# The bits of the second one are where a record that is not split has the tag of an exact label.
@pytest.mark.parametrize("label", [2**24 + 1, 0x4654_0001])
def test_a_record_that_is_split_inside_its_header_has_its_exact_label(tmp_path, label):
    with RecordWriter(tmp_path / "train.rec") as writer:
        writer.write(0, RecordHeader.of_image(label, MAGIC), b"image")
    assert images_of(open_records(tmp_path)) == [(label, b"image")]


def test_a_missing_index_is_rebuilt_by_a_scan(tmp_path):
    write_records(tmp_path, [0, 0, 1])
    with_index = read_index(tmp_path / "train.rec", tmp_path / "train.idx")
    (tmp_path / "train.idx").unlink()
    without = read_index(tmp_path / "train.rec", tmp_path / "train.idx")
    for a, b in zip(with_index, without, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "written",
    [lambda text: text.replace("\n", "\r\n"), lambda text: text.rstrip("\n"), lambda text: f"{text}\n"],
)
def test_the_lines_of_an_index_may_end_as_on_windows_or_the_last_one_without_an_end(tmp_path, written):
    idx = write(tmp_path / "a.rec", [b"x", b"y"]).with_suffix(".idx")
    idx.write_bytes(written(idx.read_text()).encode())
    keys, offsets = read_index(tmp_path / "a.rec", idx)
    assert (keys.tolist(), offsets.tolist()) == ([0, 1], [0, 36])


def test_the_catalog_is_cached_and_rebuilt_when_the_file_changes(tmp_path):
    write_records(tmp_path, [0, 0, 1])
    for _ in range(2):
        dataset = open_records(tmp_path)
        assert isinstance(dataset.columns.arrays["offset"].base.obj, mmap.mmap)
        assert dataset.labels.tolist() == [0, 0, 1] and dataset.columns.value("announced") == 4.0
    assert len(pickle.dumps(dataset)) < 1000
    write_records(tmp_path, [0, 1, 2, 2])
    assert open_records(tmp_path).labels.tolist() == [0, 1, 2, 2]


def damaged(path, at, data):
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda rec, idx: rec.write_bytes(rec.read_bytes()[:70]), "past the end|truncated"),
        (lambda rec, idx: idx.write_text("0\t0\n1\t99999999\n"), "key 1 at byte 99,999,999"),
        (lambda rec, idx: idx.write_text("0\t0\n1\t-4\n"), "not an index"),
        (lambda rec, idx: idx.write_text("0\t0\n1\t0\n2\t56\n"), "key 0 .*runs into the next one"),
        (lambda rec, idx: idx.write_text(f"0\t0\n{1 << 53}\t64\n"), "not an index"),
        (lambda rec, idx: idx.write_text("0\t0\n0\t64\n"), "a key occurs more than once"),
        (lambda rec, idx: damaged(rec, 4, struct.pack("<I", 1 << 28)), "the file ends inside"),
        (lambda rec, idx: damaged(rec, 8, struct.pack("<I", 1 << 30)), "labels"),
        (lambda rec, idx: damaged(rec, 0, bytes(4)), "key 0 at byte 0: no record starts there"),
        # A signaling NaN, of which NumPy would warn.
        (lambda rec, idx: damaged(rec, 12, struct.pack("<I", 0x7F80_0001)), "key 0 .*its two labels differ"),
    ],
)
def test_a_damaged_file_gives_one_error_that_names_it(tmp_path, damage, message):
    rec, idx = write(tmp_path / "a.rec", [b"x" * 24, b"y" * 24]), tmp_path / "a.idx"
    damage(rec, idx)
    with pytest.raises(DataError, match=message) as caught:
        keys, offsets = read_index(rec, idx)
        build_catalog(rec, idx)
        reader = RecordReader(rec)
        for key, offset in zip(keys, offsets, strict=True):
            decode_record(reader.read_at(int(offset), int(key)), f"{rec}: key {key}")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [70, 0])
def test_the_message_about_a_damaged_file_speaks_of_an_index_only_where_there_is_one(tmp_path, size):
    write_records(tmp_path, [0, 0, 1])
    path = tmp_path / "train.rec"
    if size:
        path.write_bytes(path.read_bytes()[:size])
    else:  # the first two of the three images that record 0 announces
        _, offsets = read_index(path, tmp_path / "train.idx")
        path.write_bytes(path.read_bytes()[: offsets[3]])
    with pytest.raises(DataError, match=r"remove train\.idx"):
        open_records(tmp_path)
    (tmp_path / "train.idx").unlink()
    with pytest.raises(DataError, match=r"the file is damaged: download it again$"):
        open_records(tmp_path)


@pytest.mark.parametrize("kinds", [(2,), (3,), (1, 0), (1, 1), (4,), (1, 4)])
def test_parts_out_of_order_are_no_record(tmp_path, kinds):
    parts = [struct.pack("<II", MAGIC, kind << KIND_SHIFT | 4) + b"data" for kind in (*kinds, 3)]
    (tmp_path / "a.rec").write_bytes(b"".join(parts))
    with pytest.raises(RecordError, match=r"a part of kind \d at byte \d+ is out of order"):
        RecordReader(tmp_path / "a.rec").read_at(0)


@pytest.mark.parametrize("at", [0, 8])  # the magic, and the number of labels
def test_a_record_that_was_damaged_since_the_file_was_opened_is_refused(tmp_path, at):
    dataset = open_dataset(write(tmp_path / "train.rec", [b"x" * 24] * 2))
    damaged(dataset.path, at, struct.pack("<I", 1 << 28))
    with pytest.raises(RecordError, match="key 0"):
        dataset.read(0)
    assert dataset.read(1) == b"x" * 24


def test_a_file_that_was_cut_since_it_was_opened_gives_no_part_of_a_record(tmp_path):
    reader = RecordReader(write(tmp_path / "a.rec", [b"x" * 24]))
    os.truncate(reader.path, reader.size - 4)
    with pytest.raises(RecordError, match="at byte 0: the file ends inside the record"):
        reader.read_at(0)


def test_a_record_whose_parts_together_are_larger_than_any_image_is_refused(tmp_path, monkeypatch):
    reader = RecordReader(write(tmp_path / "a.rec", [b"abcd" + _MAGIC + b"x" * 24]))
    monkeypatch.setattr(header, "_MAX_BYTES", 40)
    with pytest.raises(RecordError, match="at byte 0: .* more than any image"):
        reader.read_at(0)


def test_a_part_that_is_longer_than_the_format_allows_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(recordio, "MAX_LENGTH", 24 + 16)
    write(tmp_path / "a.rec", [b"x" * 16])
    with pytest.raises(RecordError, match=r"a\.rec: key 0: 41 bytes"):
        write(tmp_path / "a.rec", [b"x" * 17])


def test_both_files_are_on_the_disk_when_they_are_complete(tmp_path, monkeypatch):
    synced, rec, idx = {}, tmp_path / "a.rec", tmp_path / "a.idx"
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.update({os.fstat(file).st_ino: os.fstat(file).st_size})
    )
    write(rec, [b"x"])
    assert synced == {path.stat().st_ino: path.stat().st_size for path in (rec, idx)}


@pytest.mark.parametrize(
    ("order", "ranges"),
    [([0, 0, 2], [(1.0, 3.0), (3.0, 3.0), (3.0, 4.0)]), ([0, 2, 0], [(4.0, 4.0), (4.0, 4.0), (1.0, 4.0)])],
)
def test_the_tables_of_a_file_are_those_of_insightface(tmp_path, order, ranges):
    write_identities(tmp_path, [2, 0, 1], [(label, b"image") for label in order], 112)
    reader = RecordReader(tmp_path / "train.rec")
    labels = [decode_record(reader.read_at(offset), "")[0].labels for offset in reader.scan_offsets()]
    # The keys of the tables, and those of the images of each identity; the end is not part of a range.
    assert [labels[0], *labels[4:]] == [(4.0, 7.0), *ranges]
    assert (tmp_path / "property").read_text() == "3,112,112\n"


@pytest.mark.parametrize(
    "header",
    [RecordHeader(0, (label,)) for label in (-1.0, 0.5, float("nan"), float("inf"), 2.0**24, 2.0**31)]
    + [RecordHeader.of_image(2**31, 7)],
)
def test_an_invalid_label_is_refused_with_its_key(tmp_path, header):
    with RecordWriter(tmp_path / "train.rec") as writer:
        writer.write(7, header, b"image")
    with pytest.raises(RecordError, match="key 7 at byte 0"):
        open_records(tmp_path)


@settings(max_examples=200, deadline=None)
@given(
    labels=st.lists(st.integers(0, 2**24), min_size=1, max_size=3),
    exact=st.none() | st.integers(0, 2**31 - 1),
    image=st.binary(max_size=60) | st.just(b"p" * 20_000) | st.just(b"abcd" + _MAGIC + b"efgh"),
    cut=st.integers(0, 8),
    spare=st.sampled_from([-1, 0, 1000]),
)
def test_the_fast_path_returns_the_same_image_as_the_full_path_or_none(
    tmp_path_factory, labels, exact, image, cut, spare
):
    path = tmp_path_factory.mktemp("rec") / "train.rec"
    flag = len(labels) if len(labels) > 1 else 0
    id2 = 0 if exact is None else EXACT_LABEL | exact
    with RecordWriter(path) as writer:
        writer.write(0, RecordHeader(flag, tuple(map(float, labels)), 0, id2), image)
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
    reader = RecordReader(path)
    size = reader.size + spare
    found = reader.image_at(0, size)
    if found is None:
        whole_and_short = cut == 0 and spare >= 0 and len(image) < 10_000 and _MAGIC not in image
        assert not whole_and_short
    else:
        header, data = decode_record(reader.read_at(0), "")
        assert found == (header.label, data)
    assert reader.image_at(1 << 40, 0) is None


@pytest.mark.parametrize("num_labels", [0, 1, 2, 3, 16])
def test_the_range_of_sizes_holds_the_size_of_an_image(tmp_path, num_labels):
    images = [bytes([number]) * (100 + number) for number in range(1, 9)]
    with RecordWriter(tmp_path / "train.rec") as writer:
        for number, image in enumerate(images):
            flag = num_labels if number > 1 or num_labels > 2 else 0
            writer.write(number, RecordHeader(flag, (float(number),) + (0.5,) * (flag - 1)), image)
    source = open_dataset(tmp_path)
    assert images_of(source) == list(enumerate(images))
    least, most = source.sizes(np.arange(7)).T
    size = np.array([len(image) for image in images[:7]])
    assert (least <= size).all() and (size <= most).all() and (most - least < 80).all()
    damaged = open_dataset(tmp_path)
    with (tmp_path / "train.rec").open("r+b") as file:  # the frame of the first record
        file.write(bytes(4))
    assert (damaged.sizes(np.arange(7))[:, 1] == most).all()


def test_images_that_are_not_sorted_by_label_are_all_read_with_their_own_labels(tmp_path):
    # More identities than the reader samples, and one image of label 1501 among those of 1502.
    labels = np.repeat(np.arange(3000), 3)
    labels[[4505, 4506]] = labels[[4506, 4505]]
    write_identities(tmp_path, [3] * 3000, [(label, b"image") for label in labels.tolist()], 112)
    dataset = open_dataset(tmp_path)
    assert dataset.labels.tolist() == labels.tolist()
    assert [label for label, _ in images_of(dataset)] == labels.tolist()
