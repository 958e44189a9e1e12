import errno
import json
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from facetrain.data import column_cache
from facetrain.data.column_cache import Columns, cached_columns
from facetrain.data.formats.image_folder import open_folder
from facetrain.distributed.spawn import HelperContext
from facetrain.errors import DataError
from facetrain.files import locked
from tests.support.waiting import wait_until

ARRAYS = {"label": np.arange(5), "size": np.ones(3, np.float32), "empty": np.empty(0, np.uint8)}


def save(path, inputs=(), columns=None):
    """Cache columns, which must not be in the cache yet."""
    return cached_columns(path, inputs, lambda: columns or Columns(ARRAYS))


def load(path, inputs=()):
    """Return the cached columns; None if the cache file is not used."""

    class NotCachedError(Exception):
        pass

    def build():
        raise NotCachedError

    try:
        return cached_columns(path, inputs, build)
    except NotCachedError:
        return None


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").write_bytes(b"x")
    return tmp_path / "source"


def test_columns_are_read_back_and_survive_pickling(tmp_path, source):
    save(tmp_path / "a.catalog", [source, tmp_path / "absent"], Columns.of(**ARRAYS, prefix=3))
    found = load(tmp_path / "a.catalog", [source, tmp_path / "absent"])
    for columns in (found, pickle.loads(pickle.dumps(found))):
        assert columns.value("prefix") == 3 and columns.value("suffix") is None
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(columns.arrays[name], array)
            assert columns.arrays[name].dtype == array.dtype
        assert columns is not found or not columns.arrays["label"].flags.writeable


@pytest.mark.parametrize("texts", [[], ["a"], ["", 'a", "b', "c\\", '\\"', "[x]", "é\udce9\n", "d, e"]])
def test_a_list_of_texts_is_read_one_by_one(texts):
    columns = Columns.of(names=texts)
    assert list(columns.texts("names")) == columns.value("names") == texts
    assert list(columns.texts("absent")) == []


def fill(columns):
    """Change columns in a process of its own."""
    columns.arrays["label"][...] = 7


def test_columns_without_a_file_are_in_the_memory_of_the_processes_that_are_started(monkeypatch):
    monkeypatch.setattr(column_cache, "_LEAST_SHARED_BYTES", 16)
    columns = Columns.of(label=np.arange(3), empty=ARRAYS["empty"], prefix="a").in_shared_memory()
    copy = pickle.loads(pickle.dumps(columns))
    process = HelperContext().Process(target=fill, args=(columns,))
    process.start()
    process.join()
    assert process.exitcode == 0 and columns.arrays["label"].tolist() == [7, 7, 7]
    assert copy.arrays["label"].tolist() == [0, 1, 2] and copy.value("prefix") == "a"


def require(columns, label):
    """Check the labels of columns in a process of its own."""
    assert columns.arrays["label"].tolist() == label and not columns.arrays["label"].flags.writeable


@pytest.mark.parametrize("change", [Path.unlink, lambda path: save(path, [path.parent / "absent"])])
def test_a_process_that_is_started_later_has_the_columns_of_a_replaced_cache_file(tmp_path, source, change):
    path = tmp_path / "a.catalog"
    columns = save(path, [source], Columns.of(label=np.array([3, 1, 2])))
    change(path)
    process = HelperContext().Process(target=require, args=(columns, [3, 1, 2]))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_no_process_is_started_with_columns_of_an_input_that_has_changed(tmp_path, source):
    columns = save(tmp_path / "a.catalog", [source, tmp_path / "absent"])
    os.utime(source, ns=(1, 1))
    with pytest.raises(DataError, match="source: was changed or removed while the run read it; start"):
        HelperContext().Process(target=require, args=(columns, [])).start()


def test_a_dataset_without_a_cache_file_shares_its_catalog(tmp_path, monkeypatch):
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann" / "1.png").touch()
    # A mixture of hundreds of small folders would need thousands of file descriptors.
    assert not open_folder(tmp_path).columns.shared
    monkeypatch.setattr(column_cache, "_LEAST_SHARED_BYTES", 1)
    assert open_folder(tmp_path).columns.shared.keys() >= {"label", "names"}


def test_the_folder_may_have_a_name_that_is_not_utf8(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xe9d"))
    folder.mkdir()
    (folder / "source").write_bytes(b"x")
    assert load(folder / "a.catalog", [folder / "source"]) is None
    save(folder / "a.catalog", [folder / "source"])
    assert load(folder / "a.catalog", [folder / "source"]) is not None


@pytest.mark.parametrize("count", [1, 500])
def test_columns_of_changed_inputs_are_not_used(tmp_path, count):
    sources = [tmp_path / f"{number:06}.tar" for number in range(count)]
    for source in sources:
        source.write_bytes(b"x")
    save(tmp_path / "a.catalog", sources)
    assert load(tmp_path / "a.catalog", sources) is not None
    sources[-1].write_bytes(b"xy")
    assert load(tmp_path / "a.catalog", sources) is None


def test_columns_of_files_in_another_order_are_not_used(tmp_path, source):
    first, last, renamed = (tmp_path / f"{name}.tar" for name in "bca")
    first.symlink_to(source)  # Hugging Face's cache has links, which have the stamps of their files
    last.symlink_to(source)
    save(tmp_path / "a.catalog", [first, last])
    last.rename(renamed)
    assert load(tmp_path / "a.catalog", [renamed, first]) is None


def test_columns_of_a_replaced_file_of_one_size_and_time_are_not_used(tmp_path, source, monkeypatch):
    real = os.stat

    def stat_without_times(path, **options):
        status = real(path, **options)
        times = {"st_mtime_ns": 0, "st_ctime_ns": 0}
        return SimpleNamespace(st_mode=status.st_mode, st_size=status.st_size, st_ino=status.st_ino, **times)

    monkeypatch.setattr("facetrain.data.column_cache.os.stat", stat_without_times)
    save(tmp_path / "a.catalog", [source])
    assert load(tmp_path / "a.catalog", [source]) is not None
    source.rename(tmp_path / "old")
    source.write_bytes(b"y")
    assert load(tmp_path / "a.catalog", [source]) is None


def test_columns_of_a_file_that_changes_while_it_is_read_are_not_used_again(tmp_path, source):
    def build():
        content = source.read_bytes()
        if len(content) == 1:
            source.write_text("ab")
        return Columns.of(text=np.frombuffer(content, np.uint8))

    for length in (1, 2, 2):
        assert len(cached_columns(tmp_path / "a.catalog", [source], build).arrays["text"]) == length


def with_header(path, **changes):
    """Cache a column, and change the header of the cache file."""
    save(path, [], Columns.of(label=np.arange(5)))
    data = path.read_bytes()
    path.write_bytes(json.dumps(json.loads(data[:4096]) | changes).encode().ljust(4096) + data[4096:])
    return load(path)


@pytest.mark.parametrize(
    ("dtype", "length", "position"),
    [("<i8", -1, 4096), ("<i8", 5, -8), ("<i8", 1 << 40, 4096), ("<i8", 5, 1 << 40),
     ("(,)i8", 5, 4096), ("O", 5, 4096), ("<U9", 5, 4096), ("<i8,<i8", 2, 4096)],
)  # fmt: skip
def test_columns_of_other_types_or_outside_of_the_file_are_not_used(tmp_path, dtype, length, position):
    assert with_header(tmp_path / "a.catalog", columns=[["label", dtype, length, position]]) is None
    assert with_header(tmp_path / "b.catalog", version=1) is None
    assert with_header(tmp_path / "c.catalog") is not None


def test_damaged_columns_are_not_used(tmp_path):
    path = save(tmp_path / "a.catalog").path
    data = path.read_bytes()
    path.write_bytes(data[:4096] + bytes([data[4096] ^ 1]) + data[4097:])
    assert load(tmp_path / "a.catalog") is None


def test_a_pipe_in_place_of_a_cache_file_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "a.catalog")
    assert load(tmp_path / "a.catalog") is None
    assert save(tmp_path / "a.catalog").path == tmp_path / "a.catalog"
    assert load(tmp_path / "a.catalog")


def columns_of_four_threads(path, build):
    """Return the columns of four threads, which stand for processes, and ask for them at once."""
    start = threading.Barrier(4)

    def ask(_):
        start.wait()
        return cached_columns(path, [], build)

    with ThreadPoolExecutor(4) as threads:
        return [*threads.map(ask, range(4))]


def test_of_the_processes_that_ask_for_columns_at_once_one_builds_them(tmp_path, monkeypatch):
    builds, asked = [], []

    def lock(path):
        asked.append(path)
        return locked(path)

    monkeypatch.setattr(column_cache, "locked", lock)

    def build():
        wait_until(lambda: len(asked) == 4)  # none of them has found the columns
        builds.append(1)
        return Columns.of(**ARRAYS)

    paths = {columns.path for columns in columns_of_four_threads(tmp_path / ".a.catalog", build)}
    assert paths == {tmp_path / ".a.catalog"} and len(builds) == 1
    assert [one.name for one in tmp_path.iterdir()] == [".a.catalog"], "the lock is in the cache folder"


def test_where_locks_do_not_exist_processes_with_one_id_do_not_share_a_temporary_file(tmp_path, monkeypatch):
    def no_lock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("facetrain.files.fcntl.flock", no_lock)
    columns, is_building = Columns.of(label=np.arange(1 << 20)), threading.Barrier(4, timeout=30)

    def build():
        is_building.wait()
        return columns

    paths = {found.path for found in columns_of_four_threads(tmp_path / ".a.catalog", build)}
    assert paths == {tmp_path / ".a.catalog"}
    assert (load(tmp_path / ".a.catalog").arrays["label"] == columns.arrays["label"]).all()
    assert [one.name for one in tmp_path.iterdir()] == [".a.catalog"]


def test_a_cache_file_that_could_not_be_completed_leaves_a_sound_one_in_the_cache_folder(
    tmp_path, monkeypatch
):
    replace = os.replace

    def refuse(source, target):
        if Path(target).parent == tmp_path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        saved = save(tmp_path / ".a.catalog")
    assert saved.path != tmp_path / ".a.catalog"
    assert load(tmp_path / ".a.catalog").path == saved.path


def test_a_user_without_a_home_folder_has_the_cache_beside_the_dataset_only(tmp_path, no_home):
    assert load(tmp_path / ".a.catalog") is None
    assert save(tmp_path / ".a.catalog").path == tmp_path / ".a.catalog"
    assert save(tmp_path / ".a.catalog" / "b").path is None
