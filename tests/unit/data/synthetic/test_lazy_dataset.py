import time

import pytest

from facetrain.data.open_dataset import open_dataset
from facetrain.data.synthetic.lazy_dataset import LazyDataset, write_in_background
from facetrain.errors import DataError
from tests.unit.data.synthetic.test_dataset_writer import SMALL


def lazy(folder, **changes):
    sizes = {name: (SMALL | changes)[name] for name in ("identities", "images_per_identity", "image_size")}
    return LazyDataset(folder, seed=0, **sizes)


def test_rendered_images_equal_the_written_ones_and_come_from_the_folder_once_it_exists(tmp_path):
    folder = tmp_path / "data"
    source = lazy(folder)
    rendered = [source.read(number) for number in range(source.num_images)]
    with write_in_background(source, folder, seed=0, **SMALL) as wait:
        wait()
    written = open_dataset(folder)
    assert rendered == [written.read(number) for number in range(12)] == [source.read(n) for n in range(12)]
    assert (source.num_classes, source.labels.tolist()) == (3, written.labels.tolist())
    assert source.location(5).endswith("data: image 1 of synthetic identity 1")
    (folder / "train.rec").write_bytes(b"")
    with pytest.raises(DataError):
        lazy(folder).read(0)


def test_an_image_that_one_process_rendered_is_not_rendered_by_another(tmp_path):
    source = lazy(tmp_path / "data")
    source._cache.put(5, b"rendered before")
    with write_in_background(source, tmp_path / "data", seed=0, **SMALL) as wait:
        wait()
    written = open_dataset(tmp_path / "data")
    assert written.read(5) == b"rendered before" and source._cache.get(4) == written.read(4)
    assert [path.name for path in tmp_path.iterdir()] == ["data"], "the cache file has no name"


def test_images_are_rendered_without_a_cache_too(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert lazy(tmp_path / "file" / "data").read(1) == lazy(tmp_path / "data").read(1)


def test_a_writer_that_is_not_waited_for_leaves_no_files(tmp_path):
    many = {"identities": 10**6}
    with write_in_background(lazy(tmp_path / "data", **many), tmp_path / "data", seed=0, **SMALL | many):
        while not list(tmp_path.iterdir()):
            time.sleep(0.01)
    assert not list(tmp_path.iterdir())


def test_a_writer_that_fails_prints_a_warning(tmp_path, capfd):
    (tmp_path / "file").write_text("not a folder")
    blocked = tmp_path / "file" / "data"
    with write_in_background(lazy(blocked), blocked, seed=0, **SMALL) as wait:
        wait()
    assert "warning: the synthetic dataset was not written" in capfd.readouterr().err
