import json
import pickle

import pytest

from facetrain.data.dataset import identity_name, original_name
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.check import check
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, images_of

pa = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")


def save(folder, table, *, batch=2, options=None):
    """Write a table as `save_to_disk` does: a stream of batches, and the list of files in state.json."""
    folder.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema, options=options) as stream:
        stream.write_table(table, max_chunksize=batch)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    return folder


def table_of(count, **columns):
    images = [{"bytes": encoded_image(n), "path": f"{n}.png" if n else None} for n in range(count)]
    return pa.table({"image": images, "label": [n % 3 for n in range(count)]} | columns)


def test_a_saved_dataset_is_read_in_place(tmp_path):
    names = {"info": {"features": {"label": {"names": ["ann", "bob", "zoe"], "_type": "ClassLabel"}}}}
    table = table_of(7).replace_schema_metadata({"huggingface": json.dumps(names)})
    for _ in range(2):  # the second time from the catalog
        dataset = open_dataset(save(tmp_path / "a", table))
        assert images_of(dataset) == [(n % 3, encoded_image(n)) for n in range(7)]
    assert images_of(pickle.loads(pickle.dumps(dataset))) == images_of(dataset)
    assert [original_name(dataset, n) for n in (0, 6)] == [None, "6.png"]
    assert [identity_name(dataset, n) for n in range(3)] == ["ann", "bob", "zoe"]
    assert "data-00000-of-00001.arrow: image at byte" in dataset.location(3)
    dataset.prefetch(0, 7)
    assert not check(tmp_path / "a").faults


def test_labels_of_text_and_plain_bytes_are_read(tmp_path):
    images = pa.array([encoded_image(n) for n in range(3)], pa.large_binary())
    dataset = open_dataset(save(tmp_path, pa.table({"image": images, "label": ["zoe", "ann", "zoe"]})))
    assert images_of(dataset) == [(1, encoded_image(0)), (0, encoded_image(1)), (1, encoded_image(2))]
    assert identity_name(dataset, 1) == "zoe"


def test_an_image_column_without_any_path_is_read(tmp_path):
    table = pa.table({"image": [{"bytes": encoded_image(0), "path": None}], "label": [0]})
    dataset = open_dataset(save(tmp_path, table))
    assert images_of(dataset) == [(0, encoded_image(0))] and original_name(dataset, 0) is None


def test_the_split_train_of_several_is_read(tmp_path):
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["test", "train"]}))
    save(tmp_path / "test", table_of(2))
    with pytest.raises(DataError, match="the splits test, and none of them is 'train'"):
        open_dataset(tmp_path)
    save(tmp_path / "train", table_of(5))
    assert open_dataset(tmp_path).num_images == 5 and open_dataset(tmp_path / "test").num_images == 2


@pytest.mark.parametrize(
    ("table", "message"),
    [(pa.table({"what": [1]}), "no column for the image"), (table_of(2, label=[0, None]), "no label"),
     (table_of(2, label=[0, -1]), "label -1 is not a whole"), (table_of(0), "contains no images"),
     (pa.table({"image": [None, b"x"], "label": [0, 1]}), "images are missing in the column of type binary"),
     (pa.table({"image": [1], "label": [1]}), "missing in the column of type int64"),
     # Of these, pyarrow ends the process when it converts them.
     (table_of(1, label=pa.array([(1, 2, 3)], pa.month_day_nano_interval())),
      r"of-00001\.arrow: column label has values of type month_day_nano_interval; expected whole numbers or texts"),
     (table_of(1, label=pa.array([[1]])), "column label has values of type list<")],
)  # fmt: skip
def test_tables_without_images_and_labels_are_refused(tmp_path, table, message):
    with pytest.raises(DataError, match=message):
        open_dataset(save(tmp_path, table))


def test_compressed_files_are_refused(tmp_path):
    save(tmp_path, table_of(5), options=pa.ipc.IpcWriteOptions(compression="zstd"))
    with pytest.raises(DataError, match="the file is compressed"):
        open_dataset(tmp_path)


@pytest.mark.parametrize(
    "state", ["[", "{}", '{"_data_files": [{"filename": "../x.arrow"}]}', '{"_data_files": []}',
              '{"_data_files": [{"filename": "a"}], "_indices_files": [{"filename": "b"}]}'],
)  # fmt: skip
def test_a_state_that_names_no_files_of_the_folder_is_refused(tmp_path, state):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(DataError, match="not the state of a saved dataset"):
        open_dataset(tmp_path)
