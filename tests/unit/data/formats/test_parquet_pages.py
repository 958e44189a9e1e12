"""Numbers of values in the page headers of a Parquet file."""

import numpy as np
import pytest

from facetrain.data.formats.parquet_pages import count_values
from facetrain.errors import DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_values_are_counted_over_pages_row_groups_and_nested_fields(tmp_path, version, dictionary):
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(500 * 33) % 7 * 1.0), 33)
    nested = pa.StructArray.from_arrays([pa.array(["a"] * 500), pa.array(range(500))], ["x", "y"])
    table = pa.table({"embedding": rows, "name": ["a"] * 500, "image": nested})
    settings = {"data_page_version": version, "use_dictionary": dictionary, "data_page_size": 999}
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=70, **settings)
    counts = [count_values(tmp_path / "a.parquet", name) for name in ("embedding", "name", "image", "none")]
    assert counts == [500 * 33, 500, 1000, 0]


def test_damaged_metadata_are_a_value_error(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"embedding": pa.array([[1.0, 2.0]] * 9)}), path)
    sound = path.read_bytes()
    random, refused = np.random.default_rng(0), 0
    for _ in range(2000):
        damaged = bytearray(sound[: random.integers(len(sound) + 1)] if random.random() < 0.1 else sound)
        for _ in range(random.integers(1, 4)):
            if damaged:
                damaged[random.integers(len(damaged))] = random.integers(256)
        path.write_bytes(damaged)
        try:
            count_values(path, "embedding")
        except (ValueError, DataError):
            refused += 1
    assert 0 < refused < 2000
