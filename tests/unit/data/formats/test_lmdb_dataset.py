import itertools
import os
import pickle

import numpy as np
import pytest

from facetrain.data.formats.msgpack_list import Item, list_items
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.check import check
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, images_of
from tests.support.lmdb_files import packed, trainer_values, write_lmdb

lmdb = pytest.importorskip("lmdb")


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_database_is_read_in_the_order_of_its_key_list(tmp_path, is_folder):
    path = write_lmdb(
        tmp_path / "faces.lmdb", trainer_values([n % 3 for n in range(30)]), is_folder=is_folder
    )
    for _ in range(2):  # the second time from the catalog
        dataset = open_dataset(path)
        assert images_of(dataset) == [(n % 3, encoded_image(n)) for n in range(30)]
    assert images_of(pickle.loads(pickle.dumps(dataset))) == images_of(dataset)
    assert dataset.num_classes == 3 and ": image at byte " in dataset.location(12)
    assert dataset.name(3) is None and dataset.identity_name(2) == "2"
    dataset.prefetch(0, 30)
    assert not check(path).faults


def test_without_a_list_of_keys_the_order_is_that_of_their_numbers(tmp_path):
    values = {str(n).encode(): packed(encoded_image(n), n) for n in range(12)}
    dataset = open_dataset(write_lmdb(tmp_path / "a.lmdb", values))
    assert images_of(dataset) == [(n, encoded_image(n)) for n in range(12)]


def test_keys_with_equal_numbers_have_an_order_that_does_not_depend_on_the_database(tmp_path):
    keys = [b"1", b"01", b"001", b"2", b"02"]
    for number, order in enumerate((keys, keys[::-1])):
        values = {key: packed(encoded_image(keys.index(key)), keys.index(key)) for key in order}
        dataset = open_dataset(write_lmdb(tmp_path / f"{number}.lmdb", values))
        assert [label for label, _ in images_of(dataset)] == [2, 1, 0, 4, 3]


def test_named_keys_are_the_names_of_the_images(tmp_path):
    values = {b"zoe/1.png": packed(encoded_image(0), 1), b"ann/1.png": packed(encoded_image(1), 0)}
    values |= {b"__keys__": packed(b"zoe/1.png", b"ann/1.png")}
    dataset = open_dataset(write_lmdb(tmp_path / "a.lmdb", values))
    assert [dataset.name(n) for n in range(2)] == ["zoe/1.png", "ann/1.png"]


def test_the_places_of_values_of_all_sizes_hold_what_the_library_reads(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "a.lmdb"
    sizes = [1, 100, 2000, 2030, 2040, 4000, 4096, 5000, 70_000]
    expected = {}
    with lmdb.open(str(path), map_size=1 << 26, subdir=False) as database:
        for start in range(0, 3000, 500):  # several transactions, so that pages are moved and freed
            with database.begin(write=True) as transaction:
                for n in range(start, start + 500):
                    expected[n * 7919 % 3000] = n % 5, rng.bytes(sizes[n % 9])
                    label, image = expected[n * 7919 % 3000]
                    transaction.put(str(n * 7919 % 3000).encode(), packed(image, label))
                for n in range(start, start + 500, 3):
                    transaction.delete(str(n * 7919 % 3000).encode())
                    del expected[n * 7919 % 3000]
    assert images_of(open_dataset(path)) == [expected[key] for key in sorted(expected)]


def test_a_crash_of_the_library_on_a_damaged_file_is_one_error(tmp_path):
    path = write_lmdb(tmp_path / "a.lmdb", trainer_values([0] * 200))
    os.truncate(path, 8192)  # the library then reads past the end of the file, which is a SIGBUS
    with pytest.raises(DataError) as caught:
        open_dataset(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("mask", [[4, 0, 5], [True, False, False, False, True, True]])
def test_a_mask_selects_images(tmp_path, mask):
    write_lmdb(tmp_path / "a.lmdb", trainer_values([n % 3 for n in range(6)]))
    np.save(tmp_path / "mask.npy", np.array(mask))
    (tmp_path / "subset.yaml").write_text("datasets:\n  - path: a.lmdb\n    mask: mask.npy\n")
    dataset = open_dataset(tmp_path / "subset.yaml")
    order = [4, 0, 5] if mask[0] == 4 else [0, 4, 5]
    assert [image for _, image in images_of(dataset)] == [encoded_image(n) for n in order]
    assert dataset.labels.tolist() == [order[n] % 3 for n in range(3)] and dataset.num_classes == 3


@pytest.mark.parametrize(
    ("mask", "message"),
    [(np.array([6]), "a number of none; expected a NumPy array of image numbers from 0 to 5"),
     (np.array([0, -1]), "a number of none"), (np.zeros(6, bool), "no image"),
     (np.array([]), "float64 of shape"), (np.ones(4, bool), "bool of shape"),
     (np.array([{}]), "Python objects"), (np.ones((2, 2), int), "int64 of shape")],
)  # fmt: skip
def test_a_mask_that_does_not_fit_is_refused(tmp_path, mask, message):
    write_lmdb(tmp_path / "a.lmdb", trainer_values([n % 3 for n in range(6)]))
    np.save(tmp_path / "mask.npy", mask, allow_pickle=True)
    (tmp_path / "subset.yaml").write_text("datasets:\n  - path: a.lmdb\n    mask: mask.npy\n")
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path / "subset.yaml")


@pytest.mark.parametrize(
    ("values", "message"),
    [({b"0": b"\x01"}, "of msgpack"), ({b"0": pickle.dumps((b"x", 1))}, "of msgpack"),
      ({b"0": packed(b"x", b"y")}, "expected one of each"),
     ({b"0": packed(b"x", 2**31)}, "the label 2147483648"), ({b"__len__": b"\x01"}, "no images"),
     ({b"0": packed(b"x", 1), b"__keys__": packed(b"1")}, "not the list of the 1 keys: there is no b'1'"),
     ({b"0": packed(b"x" * 99, 1), b"__keys__": packed(b"0", b"0")}, "2 keys are listed, 1 different ones"),
     ({b"0": packed(b"x" * 99, 1), b"1": packed(b"y", 1), b"__keys__": packed(b"0")}, "b'1' is not in the list")],
)  # fmt: skip
def test_other_values_are_refused(tmp_path, values, message):
    with pytest.raises(DataError, match=message):
        open_dataset(write_lmdb(tmp_path / "a.lmdb", values))


LISTS = (b"\x92", b"\xdc\x00\x02", b"\xdd\x00\x00\x00\x02")
"""Heads of a list of two items, in msgpack."""
BYTES = (b"\xb4", b"\xc4\x14", b"\xc5\x00\x14", b"\xc6\x00\x00\x00\x14", b"\xd9\x14", b"\xda\x00\x14",
         b"\xdb\x00\x00\x00\x14")  # fmt: skip
"""Heads of 20 bytes or letters."""
NUMBERS = {
    127: b"\x7f", 128: b"\xcc\x80", 1 << 8: b"\xcd\x01\x00", 1 << 16: b"\xce\x00\x01\x00\x00",
    1 << 32: b"\xcf\x00\x00\x00\x01\x00\x00\x00\x00", -1: b"\xd0\xff", -(1 << 8): b"\xd1\xff\x00",
    -(1 << 16): b"\xd2\xff\xff\x00\x00", -(1 << 32): b"\xd3\xff\xff\xff\xff\x00\x00\x00\x00",
}  # fmt: skip


@pytest.mark.parametrize("head", LISTS)
def test_all_heads_of_msgpack_are_understood(head):
    for (number, encoded), kind in itertools.product(NUMBERS.items(), BYTES):
        text = head + encoded + kind + b"x" * 20
        end = len(head + encoded)
        image = Item(end + len(kind), len(text), None)
        assert list(list_items(memoryview(text))) == [Item(len(head), end, number), image]
        for cut in range(len(text)):
            with pytest.raises(ValueError, match="longer than the value"):
                list(list_items(memoryview(text[:cut])))
