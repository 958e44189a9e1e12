"""Verification sets in the forms that other trainers hand out, and damaged ones."""

import json
import lzma
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
PIXELS = np.stack([decode_rgb(image, location="test") for image in IMAGES])


def write_compressed(path, content):
    path.write_bytes(lzma.compress(content))


def test_a_compressed_set_is_read_by_name_and_by_path(tmp_path):
    write_bin(tmp_path / "plain.bin", IMAGES, SAME)
    write_compressed(tmp_path / "hadrian.xz", (tmp_path / "plain.bin").read_bytes())
    for target in ("hadrian", str(tmp_path / "hadrian.xz")):
        loaded = open_evaluation_set(target, tmp_path)
        assert loaded.name == "hadrian" and loaded.images == IMAGES and loaded.same.tolist() == SAME


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_images_and_labels_can_be_arrays(tmp_path, protocol):
    content = ([np.frombuffer(image, np.uint8) for image in IMAGES], np.array(SAME))
    write_compressed(tmp_path / "a.xz", pickle.dumps(content, protocol))
    loaded = load_pair_set("a", tmp_path)
    assert loaded.images == IMAGES and loaded.same.tolist() == SAME


class Call:
    def __reduce__(self):
        return open, ("called", "w")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive", "not a valid .xz file"),
        (lzma.compress(pickle.dumps(([], []))[:-2]), "not a verification set"),
        (lzma.compress(pickle.dumps(([Call()], [True]))), "unexpected object .*; the file may be malicious"),
        (lzma.compress(bytes(2**26)), "decompresses to more than"),
        (lzma.compress(encoded_image(0) * 9)[:-40], "is cut off"),
    ],
)
def test_a_damaged_or_hostile_compressed_set_is_refused(tmp_path, content, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.xz").write_bytes(content)
    with pytest.raises(PairsError, match=message):
        load_pair_set("a", tmp_path)
    assert not (tmp_path / "called").exists()


def same_pixels(loaded):
    found = np.stack([decode_rgb(image, location="test") for image in loaded.images])
    return np.array_equal(found, PIXELS)


@pytest.fixture
def prepared(tmp_path):
    """Write the form of SOTA-Face-Recognition-Train-and-Test: an array of pixels and a line for each pair."""
    folder = tmp_path / "cfp_fp"
    folder.mkdir()
    np.save(folder / "cfp_fp.npy", np.moveaxis(PIXELS, 3, 1))
    np.savetxt(folder / "issame.txt", np.array(SAME).astype(int), fmt="%s")
    return folder


@pytest.fixture
def memory_file(tmp_path):
    """Write AdaFace's form: BGR pixels from −1 to 1 in a raw file, and the labels beside the folder."""
    folder = tmp_path / "agedb_30"
    (folder / "memfile").mkdir(parents=True)
    tensor = np.moveaxis(PIXELS[..., ::-1], 3, 1).astype(np.float32) / 255
    tensor = (tensor - np.float32(0.5)) / np.float32(0.5)
    tensor.tofile(folder / "memfile" / "mem_file.dat")
    (folder / "memfile" / "mem_file.dat.conf").write_text(
        json.dumps({"shape": list(tensor.shape), "dtype": "float32"})
    )
    np.save(tmp_path / "agedb_30_list.npy", np.array(SAME))
    return folder


@pytest.mark.parametrize("form", ["prepared", "memory_file"])
def test_a_set_of_pixels_keeps_every_pixel_and_becomes_a_bin(form, request, tmp_path):
    folder = request.getfixturevalue(form)
    for target in (folder.name, str(folder)):
        loaded = open_evaluation_set(target, tmp_path)
        assert loaded.name == folder.name and loaded.same.tolist() == SAME and same_pixels(loaded)
    assert convert_pair_archive(folder, tmp_path / "b.bin") == (3, 2)
    assert load_pair_set("b", tmp_path).images == loaded.images


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
    for data, image in zip(loaded.images, PIXELS, strict=True):
        expected = image.reshape(8, image.shape[0] // 8, 8, image.shape[1] // 8, 3).mean((1, 3))
        np.testing.assert_allclose(decode_rgb(data, location="test"), expected, atol=0.51)


def test_damaged_sets_of_pixels_are_refused(prepared, memory_file, tmp_path):
    def refused(name, message):
        with pytest.raises(PairsError, match=message):
            load_pair_set(name, tmp_path)

    (prepared / "issame.txt").write_text("1\n0\n")
    refused("cfp_fp", "6 images for 2 pairs")
    (prepared / "issame.txt").write_text("1\n0\n7\n")
    refused("cfp_fp", "expected 0 or 1 for each pair")
    (prepared / "issame.txt").write_text("1" * 10_000)
    refused("cfp_fp", "too large for the labels")
    (prepared / "issame.txt").write_text("# no label\n")
    refused("cfp_fp", "6 images for 0 pairs")
    (prepared / "issame.txt").write_text("1\n0\n1\n")
    np.save(prepared / "cfp_fp.npy", np.zeros((6, 3, 0, 16), np.uint8))
    refused("cfp_fp", "expected images of shape")
    np.save(prepared / "cfp_fp.npy", np.uint8(7))
    refused("cfp_fp", r"uint8 of shape \(\); expected")
    np.save(prepared / "cfp_fp.npy", np.array([Call()]), allow_pickle=True)
    refused("cfp_fp", "not an array")
    conf = memory_file / "memfile" / "mem_file.dat.conf"
    for content, message in (
        ({"shape": [7, 3, 16, 16], "dtype": "float32"}, "bytes for the shape"),
        ({"shape": [6, 3, -16, -16], "dtype": "float32"}, "expected float32 images"),
        ({"shape": [6, 3, 16, 16], "dtype": "O"}, "expected float32 images"),
        ({"shape": [6, 16, 16, 3], "dtype": "float32"}, "expected images of shape"),
        ([], "not an array of images .list indices"),
    ):
        conf.write_text(json.dumps(content))
        refused("agedb_30", message)


def image_struct(number):
    return {"bytes": IMAGES[number], "path": f"{number}.png"}


def write_arrow(folder, columns, files=1):
    """Write a folder as `Dataset.save_to_disk` of Hugging Face's datasets does."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir()
    table = columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    size = -(-len(table) // files)
    for number, name in enumerate(names):
        with (
            pyarrow.OSFile(str(folder / name), "wb") as sink,
            pyarrow.ipc.new_stream(sink, table.schema) as stream,
        ):
            stream.write_table(table.slice(number * size, size))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_the_sets_of_cvlface_are_read_in_the_order_of_their_index(tmp_path):
    order = [2, 3, 0, 1, 5, 4]
    columns = {
        "image": [image_struct(number) for number in order],
        "index": order,
        "is_same": [SAME[number // 2] for number in order],
    }
    write_arrow(tmp_path / "cplfw", columns, files=2)
    loaded = open_evaluation_set("cplfw", tmp_path)
    assert loaded.name == "cplfw" and loaded.images == IMAGES and loaded.same.tolist() == SAME


def test_the_parts_of_a_parquet_split_are_one_set(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    for part, pairs in enumerate(([0, 1], [2])):
        table = pyarrow.table(
            {
                "image1": [image_struct(2 * pair) for pair in pairs],
                "image2": [image_struct(2 * pair + 1) for pair in pairs],
                "target": [int(SAME[pair]) for pair in pairs],
            }
        )
        pyarrow.parquet.write_table(table, tmp_path / f"lfw-0000{part}-of-00002.parquet")
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
            r"column image has values of type struct<path: string>",
        ),
        ({"image": [b"x", b"y"], "is_same": [1, 1], "index": ["a", "b"]}, "index has a value that is not a"),
    ],
)
def test_a_dataset_that_is_not_a_set_of_pairs_is_refused(tmp_path, columns, message):
    write_arrow(tmp_path / "a", columns)
    with pytest.raises(PairsError, match=message):
        load_pair_set("a", tmp_path)


@pytest.mark.parametrize("form", ["arrow", "parquet"])
@pytest.mark.parametrize(
    ("column", "message"),
    [("index", r"column index has values of type timestamp\[us\]; expected whole numbers or texts"),
     ("is_same", r"column is_same has values of type timestamp"),
     ("image", r"column image has values of type timestamp\[us\]; expected bytes, or a struct of bytes and"),
     ("twice", "has two columns is_same; rename or remove one of them")],
)  # fmt: skip
def test_other_columns_are_refused(tmp_path, form, column, message):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    far = pyarrow.array([1 << 62] * 2, pyarrow.timestamp("us"))  # a year that Python does not have
    table = pyarrow.table({"image": [b"x", b"y"], "is_same": [1, 1], "index": [0, 1]} | {column: far})
    if column == "twice":
        table = table.rename_columns(["image", "is_same", "index", "is_same"])
    if form == "arrow":
        write_arrow(tmp_path / "a", table)
    else:
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(PairsError, match=message):
        load_pair_set("a", tmp_path)


def test_a_damaged_dataset_is_refused(tmp_path):
    write_arrow(tmp_path / "a", {"image": [b"x", b"y"], "is_same": [1, 1]})
    (tmp_path / "a" / "data-00000-of-00001.arrow").write_bytes(b"damaged")
    with pytest.raises(PairsError, match=r"data-00000-of-00001\.arrow: "):
        load_pair_set("a", tmp_path)
    (tmp_path / "a" / "state.json").write_text("{}")
    with pytest.raises(PairsError, match="not the state of a saved dataset"):
        load_pair_set("a", tmp_path)


def test_a_missing_set_names_those_that_exist(prepared, tmp_path):
    write_bin(tmp_path / "lfw.bin", IMAGES, SAME)
    with pytest.raises(PairsError, match="there are cfp_fp, lfw"):
        load_pair_set("absent", tmp_path)
