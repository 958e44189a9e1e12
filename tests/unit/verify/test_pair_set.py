"""Verification sets as `.bin`, with the tables beside them."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from facetrain.data.formats.bin import write_bin
from facetrain.data.formats.bin_tables import write_subjects
from facetrain.data.formats.landmark_file import landmarks_path, read_landmarks_beside, write_landmarks
from facetrain.data.images.decode import decode_rgb
from facetrain.errors import DataError, PairsError
from facetrain.verify.set_faults import warn_of_faulty_set
from facetrain.verify.sets.open_sets import open_set, open_sets
from facetrain.verify.sets.pair_set import PairSet, load_pair_set, load_pair_sets
from tests.support.datasets import encoded_image
from tests.support.pairs import convert_bin
from tests.support.protocols import write_ijb

SAME = [True, False, True]
IMAGES = [encoded_image(number) for number in range(6)]


def test_a_set_is_reduced_to_few_pixels_and_keeps_its_tables_and_landmarks(tmp_path):
    write_bin(tmp_path / "plain.bin", IMAGES, SAME)
    landmarks_N52 = np.arange(60, dtype=np.float32).reshape(6, 5, 2) / 60
    write_landmarks(tmp_path / "plain.landmarks.npy", landmarks_N52)
    write_subjects(tmp_path / "plain.bin", ["ann", "ann", "ann", "bob", "bob", "bob"])
    (tmp_path / "plain.groups.csv").write_text("group\n" + "Asian\n" * 3 + "Indian\n" * 3)
    assert convert_bin(tmp_path / "plain.bin", tmp_path / "small.bin", reduce_to=8) == (3, 2)
    loaded = load_pair_set("small", tmp_path)
    assert loaded.same.tolist() == SAME and loaded.subject.tolist() == [0, 0, 0, 1, 1, 1]
    assert (read_landmarks_beside(tmp_path / "small.bin", 6) == landmarks_N52).all()
    assert loaded.groups.read_text() == "group\nAsian\nAsian\nAsian\nIndian\nIndian\nIndian\n"
    for data, encoded in zip(loaded.images, IMAGES, strict=True):
        image = decode_rgb(encoded, location="test")
        expected = image.reshape(8, image.shape[0] // 8, 8, image.shape[1] // 8, 3).mean((1, 3))
        np.testing.assert_allclose(decode_rgb(data, location="test"), expected, atol=0.51)


def test_a_name_with_its_suffix_is_found_in_the_folder_of_the_sets(tmp_path, monkeypatch):
    (tmp_path / "sets" / "deep").mkdir(parents=True)
    write_bin(tmp_path / "sets" / "deep" / "own.bin", IMAGES, SAME)
    monkeypatch.chdir(tmp_path)
    for target in ("deep/own.bin", "deep/own", "sets/deep/own.bin"):
        assert load_pair_set(target, Path("sets")).name == "own"
    assert load_pair_set("own.bin", Path("sets/deep")).name == "own"
    with pytest.raises(PairsError, match="sets/other.bin: no such .* there are|has no verification sets"):
        load_pair_set("other.bin", Path("sets"))


def test_a_set_that_exists_twice_is_refused_until_the_path_is_given(tmp_path, monkeypatch):
    (tmp_path / "sets").mkdir()
    write_bin(tmp_path / "val.bin", IMAGES, SAME)
    write_bin(tmp_path / "sets" / "val.bin", IMAGES[:4], SAME[:2])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PairsError, match=r"\./val\.bin"):
        load_pair_set("val.bin", Path("sets"))
    assert len(load_pair_set("./val.bin", Path("sets")).same) == 3
    assert len(load_pair_set("val", Path("sets")).same) == 2
    assert len(load_pair_set("val.bin", Path()).same) == 3


def test_a_file_that_is_no_set_is_named_as_it_was_given(tmp_path):
    (tmp_path / "train.rec").write_bytes(b"record")
    with pytest.raises(PairsError, match=r"train\.rec: "):
        load_pair_set(str(tmp_path / "train.rec"), tmp_path)


def test_a_set_that_does_not_exist_is_named_as_it_was_given(tmp_path):
    with pytest.raises(PairsError) as raised:
        load_pair_set("train.rec", tmp_path)
    assert str(raised.value).startswith("train.rec (") and str(tmp_path / "train.rec.bin") in str(
        raised.value
    )


@pytest.mark.parametrize(
    ("pairs", "same", "fault"),
    [
        ([(0, 1), (2, 3)], [True, True], "of one kind"),
        ([(0, 1), (2, 2)], [True, False], "1 pair with the same image"),
        ([(0, 1), (1, 0), (2, 3)], [True, True, False], "1 pair listed again"),
        ([(0, 1), (1, 0), (2, 3)], [True, False, False], "1 pair listed both"),
        ([(2 * n, 2 * n + 1) for n in range(40)], [n < 20 for n in range(40)], "sorted by kind"),
        ([(2 * n, 2 * n + 1) for n in range(40)], [n % 4 < 2 for n in range(40)], ""),
        (
            [(2 * n, 2 * n + 1) for n in range(40)],
            [n % 20 < 10 for n in range(40)],
            "a fold of consecutive pairs",
        ),
    ],
)
def test_the_faults_of_a_set_are_named(capsys, pairs, same, fault):
    images = [b"%d" % image for pair in pairs for image in pair]
    warn_of_faulty_set(PairSet("own", images, np.array(same)))
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == bool(fault) and all(fault in line and "own" in line for line in warnings)


@pytest.mark.parametrize("name", ["own.xz", "own.bin.xz"])
def test_a_packed_set_is_read_by_its_path_and_by_its_name(tmp_path, name):
    write_bin(tmp_path / "own.bin", IMAGES, SAME)
    packed = lzma.compress((tmp_path / "own.bin").read_bytes())
    (tmp_path / "own.bin").unlink()
    (tmp_path / name).write_bytes(packed)
    write_subjects(tmp_path / name, ["ann", "ann", "ann", "bob", "bob", "bob"])
    assert (tmp_path / "own.subjects.csv").is_file()
    for target in ("own", name, str(tmp_path / name)):
        found = load_pair_set(target, tmp_path)
        assert (found.name, found.images, found.same.tolist()) == ("own", IMAGES, SAME)
        assert found.subject.tolist() == [0, 0, 0, 1, 1, 1]
    assert landmarks_path(tmp_path / name) == tmp_path / "own.landmarks.npy"
    for damage, message in (
        (packed[:-9], "cut off.*; copy it again"),
        (b"x" * 99, "not an .xz file.*; copy it again"),
        (packed + packed, "joined"),
    ):
        (tmp_path / name).write_bytes(damage)
        with pytest.raises(PairsError, match=message):
            load_pair_set("own", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LFW.BIN", "LFW.XZ", "LFW.Bin.Xz"])
def test_the_suffix_of_a_set_may_have_capitals(tmp_path, name):
    write_bin(tmp_path / "lfw.bin", IMAGES, SAME)
    data = (tmp_path / "lfw.bin").read_bytes()
    path = tmp_path / "other" / name
    path.parent.mkdir()
    path.write_bytes(data if name == "LFW.BIN" else lzma.compress(data))
    found = load_pair_set(str(path), tmp_path)
    assert (found.name, found.images) == ("LFW", IMAGES)
    assert landmarks_path(path).name == "LFW.landmarks.npy"


@pytest.mark.parametrize("name", ["LFW.BIN", "LFW.XZ", "LFW.BIN.XZ"])
def test_the_suffixes_of_a_set_may_be_in_upper_case(tmp_path, name):
    write_bin(tmp_path / "a.bin", IMAGES, SAME)
    content = (tmp_path / "a.bin").read_bytes()
    (tmp_path / name).write_bytes(content if name == "LFW.BIN" else lzma.compress(content))
    found = load_pair_set(str(tmp_path / name), tmp_path)
    assert found.name == "LFW" and found.images == IMAGES and found.groups is None


def test_zeros_after_a_packed_set_are_padding(tmp_path):
    write_bin(tmp_path / "own.bin", IMAGES, SAME)
    (tmp_path / "own.xz").write_bytes(lzma.compress((tmp_path / "own.bin").read_bytes()) + bytes(8))
    assert load_pair_set(str(tmp_path / "own.xz"), tmp_path).images == IMAGES


def test_a_packed_file_that_grows_too_much_is_refused(tmp_path):
    packed = lzma.compress(bytes(1 << 22))
    (tmp_path / "own.xz").write_bytes(packed)
    with pytest.raises(PairsError, match=rf"own\.xz: .*\b{4 * len(packed) + (1 << 21):,} bytes"):
        load_pair_set("own", tmp_path)


def write_saved(folder, images, same, *, order=None, files=2, **columns):
    """Write a set of pairs as `save_to_disk` does."""
    pa = pytest.importorskip("pyarrow")
    order = order or list(range(len(images)))
    folder.mkdir()
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    content = {
        "image": [{"bytes": images[at], "path": None} for at in order],
        "is_same": [bool(same[at // 2]) for at in order],
        "index": order,
    } | columns
    table = pa.table({name: values for name, values in content.items() if values is not None})
    for number, name in enumerate(names):
        part = table.slice(number * len(order) // files, len(order) // files)
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_indices_files": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


@pytest.mark.parametrize("kind", [bool, int])
def test_a_set_of_cvlface_is_read_in_the_order_of_its_index(tmp_path, kind):
    order = [3, 0, 5, 1, 4, 2]
    is_same = [kind(SAME[at // 2]) for at in order]
    write_saved(tmp_path / "lfw", IMAGES, SAME, order=order, is_same=is_same)
    found = open_set("lfw", tmp_path)
    assert (found.name, found.images, found.same.tolist()) == ("lfw", IMAGES, SAME)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "data-00001-of-00002.arrow").write_bytes(b"x"), "00001-of-00002.arrow"),
        (lambda folder: (folder / "data-00001-of-00002.arrow").unlink(), "00001-of-00002.arrow"),
        (
            lambda folder: (
                write_saved(folder / "x", IMAGES, SAME, files=1, is_same=[1] * 6)
                or (folder / "x/data-00000-of-00001.arrow").replace(folder / "data-00001-of-00002.arrow")
            ),
            "lfw: its files have different columns; save the set again",
        ),
        (lambda folder: (folder / "state.json").write_text("{"), "state.json"),
        (
            lambda folder: (folder / "state.json").write_text('{"_data_files": [{"filename": "../x"}]}'),
            r"\.\./x",
        ),
        (lambda folder: (folder / "state.json").write_text('{"_data_files": []}'), "has no files"),
        (
            lambda folder: (folder / "state.json").write_text('{"_data_files": [], "_indices_files": [1]}'),
            "flatten_indices",
        ),
        (
            lambda folder: (folder / "state.json").write_text('{"_data_files": [{"filename": 3}]}'),
            "the file name 3 is not in the folder",
        ),
        (lambda folder: (folder / "state.json").write_text("[]"), "state.json: .*_data_files"),
        (
            lambda folder: (folder / "state.json").write_text('{"_data_files": [1]}'),
            "state.json: .*_data_files",
        ),
    ],
)
def test_a_damaged_set_of_cvlface_is_refused_in_one_line(tmp_path, change, message):
    write_saved(tmp_path / "lfw", IMAGES, SAME)
    change(tmp_path / "lfw")
    with pytest.raises(DataError, match=message) as caught:
        open_set("lfw", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_saved_table_with_one_image_of_a_pair_is_refused(tmp_path):
    write_saved(tmp_path / "lfw", IMAGES[:5], SAME, files=1, index=None)
    with pytest.raises(PairsError, match="its 5 rows are not two images of each pair"):
        open_set("lfw", tmp_path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"is_same": None}, "no column is_same; .*IJB and TinyFace"),
        ({"is_same": [True, False] * 3}, "not two images of each pair"),
        ({"is_same": [None, None, 1, 1, 0, 0]}, "is_same has a value"),
        ({"is_same": [2, 2, 1, 1, 0, 0]}, "is_same has a value"),
        ({"is_same": ["False"] * 6}, "is_same has a value"),
        ({"index": [0, 1, 3, 4, 6, 7]}, "index 3; save the set again with whole pairs"),
        ({"index": [0, 0, 1, 1, 4, 5]}, "index 0;"),
        ({"index": [None, 1, 2, 3, 4, 5]}, "index has a value"),
        ({"index": ["0", None, "2", "3", "4", "5"]}, "index has a value"),
        ({"index": [[0], [1, 2], [2], [3], [4], [5]]}, "index has a value"),
        ({"image": [{"bytes": None, "path": "a.jpg"}] * 6}, "no bytes"),
        ({"image": ["a.jpg"] * 6}, "no bytes"),
    ],
)
def test_a_saved_table_that_is_no_set_of_pairs_is_refused(tmp_path, columns, message):
    write_saved(tmp_path / "lfw", IMAGES, SAME, files=1, **columns)
    with pytest.raises(DataError, match=message):
        open_set("lfw", tmp_path)


def test_a_name_prefers_the_data_folder_to_another_file_here(tmp_path, monkeypatch):
    (tmp_path / "lfw").write_text("notes")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PairsError, match=r"^lfw: not a verification set; expected a \.bin file"):
        load_pair_set("lfw", tmp_path / "data")
    (tmp_path / "data").mkdir()
    write_bin(tmp_path / "data" / "lfw.bin", IMAGES, SAME)
    assert load_pair_set("lfw", tmp_path / "data").images == IMAGES


@pytest.mark.parametrize("name", ["data/tinyface", "data/TINYFACE", "tinyface"])
def test_a_folder_in_place_of_a_set_of_pairs_is_named(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PairsError, match=rf"^{tmp_path / name} is a folder, and only sets of pairs"):
        load_pair_set("tinyface", tmp_path / "data")


@pytest.mark.parametrize("read", [load_pair_sets, open_sets])
def test_two_sets_of_one_name_are_refused(tmp_path, read):
    for name in ("lfw.bin", "lfw.xz"):
        write_bin(tmp_path / name, IMAGES, SAME)
    (tmp_path / "lfw.xz").write_bytes(lzma.compress((tmp_path / "lfw.bin").read_bytes()))
    with pytest.raises(PairsError, match="two evaluation sets have the same name: lfw, lfw"):
        read([str(tmp_path / "lfw.bin"), str(tmp_path / "lfw.xz")], tmp_path)


def test_a_set_with_the_name_of_the_one_to_many_protocol_of_another_one_is_refused(tmp_path):
    write_ijb(tmp_path / "ijbc")
    write_bin(tmp_path / "ijbc_1n.bin", IMAGES, SAME)
    with pytest.raises(PairsError, match="two evaluation sets have the same name: ijbc, ijbc_1n, ijbc_1n"):
        open_sets([str(tmp_path / "ijbc"), str(tmp_path / "ijbc_1n.bin")], tmp_path)


def test_a_missing_set_names_those_that_exist(tmp_path):
    for name in ("lfw", "cfp_fp"):
        write_bin(tmp_path / f"{name}.bin", IMAGES, SAME)
    with pytest.raises(PairsError, match="there are cfp_fp, lfw"):
        load_pair_set("absent", tmp_path)
