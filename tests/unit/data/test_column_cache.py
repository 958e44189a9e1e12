import json
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from facetrain.data.column_cache import Columns, cached_columns, load_columns, save_columns

ARRAYS = {"label": np.arange(5), "size": np.ones(3, np.float32), "empty": np.empty(0, np.uint8)}


def test_columns_are_read_back_and_survive_pickling(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"x")
    save_columns(tmp_path / "a.catalog", [source, tmp_path / "absent"], Columns.of(**ARRAYS, prefix=3))
    for columns in (
        load_columns(tmp_path / "a.catalog", [source, tmp_path / "absent"]),
        pickle.loads(pickle.dumps(load_columns(tmp_path / "a.catalog", [source, tmp_path / "absent"]))),
    ):
        assert columns.value("prefix") == 3 and columns.value("suffix") is None
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(columns.arrays[name], array)
            assert columns.arrays[name].dtype == array.dtype
            assert not len(array) or not columns.arrays[name].flags.writeable


def test_the_folder_may_have_a_name_that_is_not_utf8(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xe9d"))
    folder.mkdir()
    (folder / "source").write_bytes(b"x")
    assert load_columns(folder / "a.catalog", [folder / "source"]) is None
    save_columns(folder / "a.catalog", [folder / "source"], Columns(ARRAYS))
    assert load_columns(folder / "a.catalog", [folder / "source"]) is not None


def test_columns_of_changed_inputs_are_not_used(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"x")
    save_columns(tmp_path / "a.catalog", [source], Columns(ARRAYS))
    source.write_bytes(b"xy")
    assert load_columns(tmp_path / "a.catalog", [source]) is None


def test_columns_of_a_file_that_changes_while_it_is_read_are_not_used_again(tmp_path):
    source = tmp_path / "source"
    source.write_text("a")

    def build():
        content = source.read_bytes()
        if len(content) == 1:
            source.write_text("ab")
        return Columns.of(text=np.frombuffer(content, np.uint8))

    for length in (1, 2, 2):
        assert len(cached_columns(tmp_path / "a.catalog", [source], build).arrays["text"]) == length


def test_columns_can_have_any_number_of_inputs(tmp_path):
    sources = [tmp_path / f"{number:06}.tar" for number in range(500)]
    for source in sources:
        source.write_bytes(b"x")
    saved = save_columns(tmp_path / "a.catalog", sources, Columns(ARRAYS))
    for columns in (saved, load_columns(tmp_path / "a.catalog", sources)):
        np.testing.assert_array_equal(columns.arrays["label"], ARRAYS["label"])
    sources[-1].write_bytes(b"xy")
    assert load_columns(tmp_path / "a.catalog", sources) is None


def test_columns_of_another_version_are_not_used(tmp_path):
    save_columns(tmp_path / "a.catalog", [], Columns(ARRAYS))
    data = (tmp_path / "a.catalog").read_bytes()
    header = json.loads(data[:4096])
    for version, is_used in ((header["version"], True), (header["version"] - 1, False)):
        (tmp_path / "a.catalog").write_bytes(
            json.dumps(header | {"version": version}).encode().ljust(4096) + data[4096:]
        )
        assert (load_columns(tmp_path / "a.catalog", []) is not None) == is_used


@pytest.mark.parametrize(
    ("dtype", "length", "position"),
    [("<i8", -1, 4096), ("<i8", 5, -8), ("<i8", 1 << 40, 4096), ("<i8", 5, 1 << 40),
     ("(,)i8", 5, 4096), ("O", 5, 4096), ("<i8,<i8", 2, 4096)],
)  # fmt: skip
def test_columns_of_other_types_or_outside_of_the_file_are_not_used(tmp_path, dtype, length, position):
    save_columns(tmp_path / "a.catalog", [], Columns.of(label=np.arange(5)))
    data = (tmp_path / "a.catalog").read_bytes()
    header = json.loads(data[:4096])
    header["columns"] = [["label", dtype, length, position]]
    (tmp_path / "a.catalog").write_bytes(json.dumps(header).encode().ljust(4096) + data[4096:])
    assert load_columns(tmp_path / "a.catalog", []) is None


def test_processes_with_one_id_that_cache_the_same_columns_at_once_do_not_share_a_temporary_file(tmp_path):
    columns = Columns.of(label=np.arange(1 << 20))
    start = threading.Barrier(4)

    def save(_):
        start.wait()
        return save_columns(tmp_path / ".a.catalog", [], columns).path

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(save, range(4))) == {tmp_path / ".a.catalog"}
    loaded = load_columns(tmp_path / ".a.catalog", [])
    assert loaded is not None and (loaded.arrays["label"] == columns.arrays["label"]).all()
    assert [one.name for one in tmp_path.iterdir()] == [".a.catalog"]


def test_a_user_without_a_home_folder_has_the_cache_beside_the_dataset_only(tmp_path, no_home):
    name, columns = tmp_path / ".a.catalog", Columns.of(label=np.arange(3))
    assert load_columns(name, []) is None
    assert save_columns(name, [], columns).path == name
    assert save_columns(tmp_path / ".a.catalog" / "b", [], columns).path is None
