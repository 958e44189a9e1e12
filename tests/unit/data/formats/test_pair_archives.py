"""Verification sets in the forms that other trainers hand out, and damaged ones."""

import pickle

import numpy as np
import pytest

from facetrain.data.formats.bin import write_bin
from facetrain.data.formats.bin_tables import write_subjects
from facetrain.data.formats.landmark_file import read_landmarks_beside, write_landmarks
from facetrain.data.formats.pair_archives import is_pair_archive
from facetrain.data.images.decode import decode_rgb
from facetrain.errors import PairsError
from facetrain.verify.sets.evaluation_sets import open_evaluation_set
from facetrain.verify.sets.pair_set import load_pair_set
from tests.support.datasets import encoded_image
from tests.support.pairs import convert_pair_archive

SAME = [True, False, True]
IMAGES = [encoded_image(number) for number in range(6)]


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_images_and_labels_can_be_arrays(tmp_path, protocol):
    content = ([np.frombuffer(image, np.uint8) for image in IMAGES], np.array(SAME))
    (tmp_path / "a.bin").write_bytes(pickle.dumps(content, protocol))
    loaded = load_pair_set("a", tmp_path)
    assert loaded.images == IMAGES and loaded.same.tolist() == SAME


def test_a_set_is_reduced_to_few_pixels_and_keeps_its_tables_and_landmarks(tmp_path):
    write_bin(tmp_path / "plain.bin", IMAGES, SAME)
    landmarks_N52 = np.arange(60, dtype=np.float32).reshape(6, 5, 2) / 60
    write_landmarks(tmp_path / "plain.landmarks.npy", landmarks_N52)
    write_subjects(tmp_path / "plain.bin", ["ann", "ann", "ann", "bob", "bob", "bob"])
    (tmp_path / "plain.groups.csv").write_text("group\n" + "Asian\n" * 3 + "Indian\n" * 3)
    assert convert_pair_archive(tmp_path / "plain.bin", tmp_path / "small.bin", reduce_to=8) == (3, 2)
    loaded = load_pair_set("small", tmp_path)
    assert loaded.same.tolist() == SAME and loaded.subject.tolist() == [0, 0, 0, 1, 1, 1]
    assert (read_landmarks_beside(tmp_path / "small.bin", 6) == landmarks_N52).all()
    assert loaded.groups.read_text() == "group\nAsian\nAsian\nAsian\nIndian\nIndian\nIndian\n"
    for data, encoded in zip(loaded.images, IMAGES, strict=True):
        image = decode_rgb(encoded, location="test")
        expected = image.reshape(8, image.shape[0] // 8, 8, image.shape[1] // 8, 3).mean((1, 3))
        np.testing.assert_allclose(decode_rgb(data, location="test"), expected, atol=0.51)


def image_struct(number):
    return {"bytes": IMAGES[number], "path": f"{number}.png"}


def write_table(path, columns):
    pa = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    import pyarrow.parquet

    pyarrow.parquet.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path)


def test_the_sets_of_cvlface_are_read_in_the_order_of_their_index(tmp_path):
    order = [2, 3, 0, 1, 5, 4]
    columns = {
        "image": [image_struct(number) for number in order],
        "index": order,
        "is_same": [SAME[number // 2] for number in order],
    }
    for part in range(2):
        rows = slice(3 * part, 3 * part + 3)
        parts = {name: values[rows] for name, values in columns.items()}
        write_table(tmp_path / f"cplfw-{part:05}-of-00002.parquet", parts)
    loaded = open_evaluation_set("cplfw", tmp_path)
    assert loaded.name == "cplfw" and loaded.images == IMAGES and loaded.same.tolist() == SAME


def test_the_parts_of_a_parquet_split_are_one_set(tmp_path):
    for part, pairs in enumerate(([0, 1], [2])):
        columns = {
            "image1": [image_struct(2 * pair) for pair in pairs],
            "image2": [image_struct(2 * pair + 1) for pair in pairs],
            "target": [int(SAME[pair]) for pair in pairs],
        }
        write_table(tmp_path / f"lfw-0000{part}-of-00002.parquet", columns)
    assert is_pair_archive(tmp_path / "lfw.parquet")
    for target in ("lfw", str(tmp_path / "lfw.parquet")):
        loaded = open_evaluation_set(target, tmp_path)
        assert loaded.name == "lfw" and loaded.images == IMAGES and loaded.same.tolist() == SAME


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [1, 2], "label": [0, 0]}, "columns image, label; a set of pairs has"),
        ({"image": [b"x", b"y"], "is_same": [True, False]}, "differs between the two images of a pair"),
        ({"image": [b"x", b"y"], "is_same": [2, 2]}, "a value other than 0 and 1"),
        ({"image": [b"x", None], "is_same": [1, 1]}, "row 1 has no image bytes"),
        (
            {"image": [{"path": "x"}] * 2, "is_same": [1, 1]},
            "column image has values of type struct<path: ",
        ),
        ({"image": [b"x", b"y"], "is_same": [1, 1], "index": ["a", "b"]}, "index has a value that is not a"),
    ],
)
def test_a_dataset_that_is_not_a_set_of_pairs_is_refused(tmp_path, columns, message):
    write_table(tmp_path / "a.parquet", columns)
    with pytest.raises(PairsError, match=message):
        load_pair_set("a", tmp_path)


@pytest.mark.parametrize(
    ("column", "message"),
    [("index", r"column index has values of type timestamp\[us\]; expected whole numbers or texts"),
     ("is_same", r"column is_same has values of type timestamp"),
     ("image", r"column image has values of type timestamp\[us\]; expected bytes, or a struct of bytes and"),
     ("twice", "has two columns is_same; rename or remove one of them")],
)  # fmt: skip
def test_other_columns_are_refused(tmp_path, column, message):
    pyarrow = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    far = pyarrow.array([1 << 62] * 2, pyarrow.timestamp("us"))  # a year that Python does not have
    table = pyarrow.table({"image": [b"x", b"y"], "is_same": [1, 1], "index": [0, 1]} | {column: far})
    if column == "twice":
        table = table.rename_columns(["image", "is_same", "index", "is_same"])
    write_table(tmp_path / "a.parquet", table)
    with pytest.raises(PairsError, match=message):
        load_pair_set("a", tmp_path)


def test_a_damaged_set_is_refused(tmp_path):
    write_table(tmp_path / "a.parquet", {"image": [b"x", b"y"], "is_same": [1, 1]})
    (tmp_path / "a.parquet").write_bytes(b"damaged")
    with pytest.raises(PairsError, match=r"a\.parquet: "):
        load_pair_set("a", tmp_path)


def test_a_missing_set_names_those_that_exist(tmp_path):
    for name in ("lfw", "cfp_fp"):
        write_bin(tmp_path / f"{name}.bin", IMAGES, SAME)
    with pytest.raises(PairsError, match="there are cfp_fp, lfw"):
        load_pair_set("absent", tmp_path)
