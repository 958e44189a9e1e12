import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from facetrain.data.formats import parquet
from facetrain.data.images import header
from facetrain.data.open_dataset import open_dataset
from facetrain.data.skipped_files import skipped_summary
from facetrain.errors import DataError, UnreadableError
from tests.support.datasets import encoded_image, images_of
from tests.support.memory import resident_peak, traced_peak

pa = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.mark.parametrize("names", [["p1", "p0", "p1"], [1, 0, 1]])
@pytest.mark.parametrize("nested", [False, True])
def test_parquet_rows_are_images(tmp_path, names, nested):
    images = [encoded_image(n) for n in range(3)]
    column = [{"bytes": p, "path": None} for p in images] if nested else pa.array(images, "large_binary")
    table = pa.table({"jpg": [b""] * 3, "id": [3, 4, 5], "image": column, "label": names})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(table, tmp_path / "b.parquet", compression=None, use_dictionary=False)
    dataset = pickle.loads(pickle.dumps(open_dataset(tmp_path)))
    assert images_of(dataset) == list(zip([1, 0, 1, 1, 0, 1], images * 2, strict=True))
    assert "a.parquet: row group 1, row 0" in dataset.location(2)
    # Also of compressed images: verification sets are searched for images of these sizes.
    assert dataset.sizes(np.arange(6)).tolist() == [[len(image)] * 2 for image in images * 2]
    dataset.prefetch(0, 6)  # of which only those in b.parquet have a place


def test_parquet_without_the_columns_is_refused(tmp_path):
    pq.write_table(pa.table({"what": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column.* what"):
        open_dataset(tmp_path)
    for content, reason in ((b"PAR1 nonsense PAR1", ""), (b"", "size is 0 bytes")):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(
            DataError, match=rf"a\.parquet: .*{reason}.*damaged or incomplete: copy it again$"
        ):
            open_dataset(tmp_path)


@pytest.mark.parametrize("repeated", ["image", "label"])
def test_two_columns_of_one_name_are_refused_and_no_damage(tmp_path, repeated):
    names = sorted(["image", "label", repeated])
    columns = [pa.array([encoded_image(0)]) if name == "image" else pa.array([0]) for name in names]
    pq.write_table(pa.Table.from_arrays(columns, names=names), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet: has several columns with the name {repeated}; rename"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_images_of_a_plain_column_are_read_in_place(tmp_path, nested, monkeypatch):
    monkeypatch.setattr(parquet, "_FIND_BYTES", 1)  # images are at all borders of what is searched at once
    # Equal values, and values that contain others: each must be found at its own place.
    images = [encoded_image(n % 5, 16 + n % 3) for n in range(40)]
    images[7] = images[6] + len(images[5]).to_bytes(4, "little") + images[5]
    images[8] = images[9] = images[5]
    column = [{"bytes": image, "path": f"{n}.png"} for n, image in enumerate(images)] if nested else images
    table = pa.table({"image": column, "label": [n % 3 for n in range(40)]})
    pq.write_table(
        table,
        tmp_path / "a.parquet",
        compression=None,
        use_dictionary=False,
        write_statistics=False,  # which have images, before those of the page
        row_group_size=15,
        data_page_size=3000,
    )
    for _ in range(2):  # the second time from the catalog
        dataset = open_dataset(tmp_path)
        offset, size = (dataset.columns.arrays[name] for name in ("offset", "size"))
        assert offset[0] >= 0 and (offset[1:] >= (offset + size)[:-1]).all()
        assert images_of(dataset) == [(n % 3, image) for n, image in enumerate(images)]
    assert dataset.name(3) == ("3.png" if nested else None)
    dataset.prefetch(0, 40)


@pytest.mark.parametrize("columns", [("image", "label"), ("id",), ()])
@pytest.mark.parametrize("labels", [[1, 0, 1], ["p1", "p0", "p1"]])
def test_a_file_without_rows_may_have_other_columns_and_none_of_a_type(tmp_path, labels, columns):
    for name in ("a", "c"):
        pq.write_table(pa.table({column: pa.nulls(0) for column in columns}), tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match="contains no images"):
        open_dataset(tmp_path)
    images = [encoded_image(n) for n in range(3)]
    pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / "b.parquet")
    assert images_of(open_dataset(tmp_path)) == list(zip([1, 0, 1], images, strict=True))


@pytest.mark.parametrize(("share", "groups"), [(2, 2), (0.5, 1)])
def test_row_groups_in_memory_are_bounded_by_the_bytes_of_their_images(tmp_path, monkeypatch, share, groups):
    images = [encoded_image(n) for n in range(20)]
    table = pa.table({"image": images, "label": [0] * 20})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(table[:0], tmp_path / "b.parquet")
    dataset = open_dataset(tmp_path)
    largest = max(len(images[row]) + len(images[row + 1]) for row in range(0, 20, 2))
    monkeypatch.setattr(parquet, "_CACHE_BYTES", share * largest)
    for index in [0, 19, 7, 3, 7, 0, 12]:
        assert dataset.read(index) == images[index]
    assert dataset._groups[parquet._read_images].cache_info().currsize == groups


@pytest.mark.parametrize("nested", [False, True])
def test_of_many_threads_one_decodes_a_row_group_and_names_are_read_without_images(
    tmp_path, monkeypatch, nested
):
    images = [encoded_image(n) for n in range(16)]
    column = [{"bytes": image, "path": f"{n}.png"} for n, image in enumerate(images)] if nested else images
    pq.write_table(pa.table({"image": column, "label": [0] * 16}), tmp_path / "a.parquet")
    dataset, decoded, start = open_dataset(tmp_path), [], threading.Barrier(16)
    read_row_group = pq.ParquetFile.read_row_group

    def read_counted(file, group, columns):
        decoded.append((group, columns))
        return read_row_group(file, group, columns)

    def read_at_once(index):
        start.wait()
        return dataset.read(index), dataset.name(index)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_counted)
    monkeypatch.setattr(parquet, "_CACHE_BYTES", 1)  # one group, of images and of names each
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(read_at_once, range(16)))
    assert found == [(image, f"{n}.png" if nested else None) for n, image in enumerate(images)]
    assert sorted(decoded) == [(0, ["image"]), (0, ["image.path"])]


def test_no_image_of_a_compressed_column_has_more_bytes_than_the_limit(tmp_path, monkeypatch):
    pq.write_table(pa.table({"image": [encoded_image(0)], "label": [0]}), tmp_path / "a.parquet")
    monkeypatch.setattr(header, "_MAX_BYTES", 100)
    with pytest.raises(UnreadableError, match=r"a\.parquet: row group 0, row 0: .* more than any image"):
        open_dataset(tmp_path).read(0)


def test_a_damaged_name_is_refused_when_the_dataset_is_opened(tmp_path):
    column = [{"bytes": encoded_image(0), "path": "ann.png"}]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": column, "label": [0]}), path, compression=None)
    path.write_bytes(path.read_bytes().replace(b"ann", b"an\xff"))
    with pytest.raises(DataError, match=r"a\.parquet: .*UTF8.*: copy it again$"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("compression", [None, "snappy"])
@pytest.mark.parametrize(
    ("empty", "image"),
    [
        (None, encoded_image(0)),
        (None, {"bytes": encoded_image(0), "path": "a.png"}),
        ({"bytes": None, "path": "b.png"}, {"bytes": encoded_image(0), "path": "a.png"}),
    ],
)
def test_a_row_without_bytes_is_refused_when_it_is_read(tmp_path, empty, image, compression):
    table = pa.table({"image": [image, empty] * 3, "label": [0, 1] * 3})
    pq.write_table(table, tmp_path / "a.parquet", compression=compression, row_group_size=2)
    dataset = open_dataset(tmp_path)
    with pytest.raises(DataError, match=r"a\.parquet: row group 1, row 1"):
        dataset.read(3)
    assert [dataset.read(index) for index in (0, 2, 4)] == [encoded_image(0)] * 3
    paths = [row.get("path") if isinstance(row, dict) else None for row in (image, empty)]
    assert [dataset.name(index) for index in (2, 3)] == paths


@pytest.mark.parametrize("image", ["a text", [1, 2], {"path": "a.png"}, None])
def test_a_column_without_bytes_is_refused_with_its_type(tmp_path, image):
    table = pa.table({"image": [image], "label": [0]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: column image .* of type \w+.*; expected"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("kind", ["large_binary", pa.dictionary(pa.int32(), pa.binary())], ids=str)
def test_images_are_bytes_of_any_type(tmp_path, kind):
    images = [encoded_image(n) for n in (0, 1, 0)]
    pq.write_table(pa.table({"image": pa.array(images, kind), "label": [0, 1, 2]}), tmp_path / "a.parquet")
    assert images_of(open_dataset(tmp_path)) == list(enumerate(images))


def test_a_long_identity_name_does_not_lengthen_the_others(tmp_path):
    names = ["x" * (1 << 20), *(f"person {n % 7}" for n in range(20_000))]
    table = pa.table({"image": [b"image"] * len(names), "label": names})
    pq.write_table(table, tmp_path / "a.parquet")
    with resident_peak() as peak:
        source = open_dataset(tmp_path)
    assert peak.bytes < 100 << 20
    assert source.num_classes == 8 and source.labels[:4].tolist() == [7, 0, 1, 2]


def write_labels(path, labels):
    labels = pa.array(*labels) if isinstance(labels, tuple) else pa.array(labels)
    pq.write_table(pa.table({"image": [encoded_image(n) for n in range(len(labels))], "label": labels}), path)
    return path.parent


@pytest.mark.parametrize(
    "kind",
    ["string", "binary", "large_string", "large_binary", pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_labels_are_texts_also_as_bytes_or_whole_numbers_also_as_floats(tmp_path, kind):
    dataset = open_dataset(write_labels(tmp_path / "a.parquet", (["zoë", "ann"], kind)))
    assert dataset.labels.tolist() == [1, 0] and dataset.identity_name(1) == "zoë"
    write_labels(tmp_path / "a.parquet", [10.0, 9.0, 10.0])
    assert open_dataset(write_labels(tmp_path / "b.parquet", [9, 10])).labels.tolist() == [10, 9, 10, 9, 10]


def test_two_labels_that_are_no_utf8_are_two_identities(tmp_path):
    dataset = open_dataset(write_labels(tmp_path / "a.parquet", [b"\xff", b"\xfe"]))
    assert dataset.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("labels", "named"),
    [([0, 1, None, 2, None], "2 rows"), (["ann", None], "1 row has"), ([1, float("nan")], "nan"), ([1, 0.5], "0.5"),
     ([1, float("inf")], "inf"), (["5", "-1"], "label -1 is negative"),
     (["ann", ""], "a label is empty, as those of unknown"), (["ann", " "], "a label is empty"),
     ([True, True], "type bool"), (np.array([1, -1], "float16"), "label -1 is negative")],
)  # fmt: skip
def test_other_labels_are_refused(tmp_path, labels, named):
    with pytest.raises(DataError, match=named):
        open_dataset(write_labels(tmp_path / "a.parquet", labels))


def test_dates_are_neither_labels_nor_names(tmp_path):
    far = pa.array([1 << 62], pa.timestamp("us"))  # a year that Python does not have
    struct = pa.StructArray.from_arrays([pa.array([encoded_image(0)]), far], ["bytes", "path"])
    pq.write_table(pa.table({"image": struct, "label": [0]}), tmp_path / "a.parquet")
    dataset = open_dataset(tmp_path)
    assert dataset.read(0) == encoded_image(0) and dataset.name(0) is None
    pq.write_table(pa.table({"image": struct, "label": far}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: column label"):
        open_dataset(tmp_path)


def write_feature(path, feature, *, count=2):
    """Write a file whose labels are numbers, described as `datasets` does."""
    images, labels = [encoded_image(n) for n in range(count)], [n % 2 for n in range(count)]
    features = {"info": {"features": {"label": feature}}}
    table = pa.table({"image": images, "label": labels})
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), path)


def write_named(path, names, **options):
    """Write a file whose labels are numbers with names."""
    write_feature(path, {"names": names, "_type": "ClassLabel"}, **options)


@pytest.mark.parametrize(
    ("feature", "name"),
    [({"names": [7, 8]}, "8"), ({"names": "ab"}, "1"), ({"dtype": "int64"}, "1"), (None, "1")],
)
def test_only_a_list_has_the_names_of_labels(tmp_path, feature, name):
    write_feature(tmp_path / "a.parquet", feature)
    assert open_dataset(tmp_path).identity_name(1) == name


@pytest.mark.parametrize(
    ("names", "message"),
    [(["-1", "ann"], "label -1 is negative"), (["é", "e\u0301"], "NFC"), (["", "ann"], "label is empty")],
)
def test_names_of_labels_that_are_no_different_people_are_refused(tmp_path, names, message):
    write_named(tmp_path / "a.parquet", ["ann", *names], count=1)
    assert open_dataset(tmp_path).labels.tolist() == [0]  # without an image of the others
    write_named(tmp_path / "a.parquet", names)
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path)


def test_names_of_labels_that_are_the_labels_are_no_names(tmp_path):
    write_named(tmp_path / "a.parquet", ["0", "1"])
    assert open_dataset(tmp_path).identity_names() is None
    write_named(tmp_path / "a.parquet", ["1", "0"])
    assert list(open_dataset(tmp_path).identity_names()) == ["1", "0"]


def test_the_names_of_one_file_at_a_time_are_in_memory(tmp_path):
    names = [f"person {number}" for number in range(4000)]
    for file in range(16):
        write_named(tmp_path / f"{file}.parquet", names)
        if file == 1:
            with traced_peak() as few:
                open_dataset(tmp_path)
    with traced_peak() as many:
        open_dataset(tmp_path)
    assert many.bytes < 2 * few.bytes


@pytest.mark.slow
def test_a_footer_of_more_than_100_mb_is_read(tmp_path):
    table = pa.table({"image": [encoded_image(0)], "label": [0]})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"note": bytes(101_000_000)})
    assert open_dataset(tmp_path).read(0) == encoded_image(0)


@pytest.mark.parametrize("others", [["cy", "dan"], ["ann"]])
def test_files_whose_labels_have_different_names_are_refused(tmp_path, others):
    write_named(tmp_path / "a.parquet", ["ann", "bob"])
    write_named(tmp_path / "b.parquet", ["ann", "bob"])
    assert open_dataset(tmp_path).identity_name(1) == "bob"
    write_named(tmp_path / "c.parquet", others)
    with pytest.raises(DataError, match=r"a\.parquet and .*c\.parquet"):
        open_dataset(tmp_path)


def test_of_files_of_several_splits_those_of_train_are_read(tmp_path):
    write_named(tmp_path / "test.parquet", ["cy", "dan"])
    write_named(tmp_path / "val.easy-00000-of-00002.parquet", ["ann", "bob"])
    for number, fingerprint in enumerate(("2f8f6bfa852eac4b", "2173151d8cd6c7fb")):
        write_named(tmp_path / f"train-0000{number}-of-00002-{fingerprint}.parquet", ["ann", "bob"], count=3)
    dataset = pickle.loads(pickle.dumps(open_dataset(tmp_path)))
    assert dataset.num_images == 6 and dataset.identity_name(0) == "ann"
    assert skipped_summary(dataset.skipped) == [
        "files of other splits: 2 (test.parquet, val.easy-00000-of-00002.parquet)"
    ]


def test_a_file_of_another_split_that_is_added_later_is_listed_as_left_out(tmp_path):
    write_named(tmp_path / "train-00000-of-00001.parquet", ["ann", "bob"])
    assert not open_dataset(tmp_path).skipped
    write_named(tmp_path / "test-00000-of-00001.parquet", ["cy", "dan"])
    assert [one.name for one in open_dataset(tmp_path).skipped] == ["test-00000-of-00001.parquet"]


def test_files_of_which_one_has_numbers_as_labels_and_the_other_texts_are_refused(tmp_path):
    write_labels(tmp_path / "a.parquet", [7])
    write_labels(tmp_path / "b.parquet", ["7"])
    with pytest.raises(DataError, match=r"a\.parquet and .*b\.parquet: the labels of one are texts"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("renamed", ["image", "label"])
def test_files_with_other_columns_are_named(tmp_path, renamed):
    for file in ("a", "b"):
        names = {"image": "image", "label": "label"} | ({renamed: "class"} if file == "b" else {})
        table = pa.table({names["image"]: [encoded_image(0)], names["label"]: [0]})
        pq.write_table(table, tmp_path / f"{file}.parquet")
    with pytest.raises(DataError, match=rf"b\.parquet: .*{renamed}.*a\.parquet"):
        open_dataset(tmp_path)
