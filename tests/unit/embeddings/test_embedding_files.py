import resource
from pathlib import Path

import numpy as np
import pytest

from facetrain.embeddings.embedding_files import Embeddings, load_embeddings, save_embeddings
from facetrain.errors import DataError
from tests.support import bombs


def some(count=7, size=4):
    unit = np.random.default_rng(0).normal(size=(count, size)).astype(np.float32)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    return Embeddings(unit, [f"ä {n}.jpg" for n in range(count)], np.arange(count) - 1)


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_embeddings_are_read_as_they_were_written(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    save_embeddings(tmp_path / f"e{suffix}", some())
    found = load_embeddings(tmp_path / f"e{suffix}")
    np.testing.assert_allclose(found.embedding, some().embedding, rtol=1e-6)
    assert (found.name, found.label.tolist()) == (some().name, some().label.tolist())
    assert [path.name for path in tmp_path.iterdir()] == [f"e{suffix}"]


def test_a_table_of_embeddings_has_a_row_for_each_face(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    save_embeddings(tmp_path / "e.parquet", some())
    table = parquet.read_table(tmp_path / "e.parquet")
    assert table.column_names == ["name", "label", "embedding"] and table.num_rows == 7
    np.testing.assert_allclose(table["embedding"][3].as_py(), some().embedding[3])


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_a_file_that_holds_no_embeddings_is_refused(tmp_path, suffix):
    path = tmp_path / f"e{suffix}"
    with pytest.raises(DataError, match="No such file"):
        load_embeddings(path)
    path.write_bytes(b"not an archive" * 9)
    with pytest.raises(DataError, match="not a file of embeddings"):
        load_embeddings(path)


def test_pickled_names_are_refused(tmp_path):
    np.savez(tmp_path / "p.npz", embedding=np.ones((1, 4)), name=np.array(["a"], object), label=np.zeros(1))
    with pytest.raises(DataError, match="claims the shape|not a file of embeddings"):
        load_embeddings(tmp_path / "p.npz")


@pytest.mark.parametrize("number", [np.nan, np.inf, -1e30, 1e300])
def test_numbers_whose_length_is_not_finite_are_refused(tmp_path, number):
    embedding = np.array([[1, 0], [number, 1]])
    np.savez(tmp_path / "e.npz", embedding=embedding, name=np.array(["a", "b"]), label=np.zeros(2, int))
    with pytest.raises(
        DataError, match=r"e\.npz: row 1 \(b\) has numbers that are not finite, or whose squares are not"
    ):
        load_embeddings(tmp_path / "e.npz")


def test_an_unknown_suffix_is_refused():
    with pytest.raises(DataError, match=r"unknown suffix .* use \.npz or \.parquet"):
        save_embeddings(Path("e.csv"), some())


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\5\6" + bytes(18), b"\x93NUMPY\1\0\1\0 ", bytes(100)],
    ids=["empty", "no arrays", "npy", "zeros"],
)
@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path, content, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a file of embeddings") as caught:
        load_embeddings(path)
    assert "\n" not in str(caught.value)


def test_an_array_that_claims_more_than_it_has_is_refused_before_it_is_allocated(tmp_path):
    claimed = "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 512)}"
    with pytest.raises(DataError, match=r"claims the shape \(1099511627776, 512\)"):
        load_embeddings(bombs._npz(tmp_path / "a.npz", claimed=claimed))


@pytest.mark.slow
def test_embeddings_that_compress_a_hundred_times_are_refused(tmp_path):
    with pytest.raises(DataError, match="decompresses to .* more than"):
        load_embeddings(bombs._npz(tmp_path / "a.npz", rows=1 << 17))
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="decompresses to .* more than"):
        load_embeddings(bombs._embeddings_parquet(tmp_path / "a.parquet", rows=2_000, size=40_000, name="x"))


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_half_precision_needs_half_the_space(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    for dtype in ("float32", "float16"):
        save_embeddings(tmp_path / f"{dtype}{suffix}", some(600, 64), dtype)
    half, full = (tmp_path / f"{dtype}{suffix}" for dtype in ("float16", "float32"))
    assert half.stat().st_size < 0.8 * full.stat().st_size
    found = load_embeddings(half).embedding
    assert found.dtype == np.float32 and np.abs(found - some(600, 64).embedding).max() < 1e-3


def test_an_npz_file_has_the_arrays_that_numpy_reads(tmp_path):
    save_embeddings(tmp_path / "e.npz", some())
    with np.load(tmp_path / "e.npz") as arrays:
        assert arrays["name"].tolist() == some().name and arrays["label"].tolist() == some().label.tolist()
        np.testing.assert_array_equal(arrays["embedding"], some().embedding)


@pytest.mark.slow
def test_one_row_of_equal_numbers_is_refused_before_it_is_decoded(tmp_path):
    pytest.importorskip("pyarrow")
    # A row of 100 million numbers in 800 bytes: decoded, it would need 400 MiB, and its levels 400 MiB more.
    path = bombs._embeddings_parquet(tmp_path / "a.parquet", rows=1, size=100_000_000, name="x")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"decompresses to 400,000,000 bytes, more than"):
        load_embeddings(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_rows_of_different_sizes_are_refused(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"embedding": pa.array([[1.0], [1.0, 2.0, 3.0]]), "name": ["a", "b"], "label": [0, 1]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="of different sizes"):
        load_embeddings(tmp_path / "a.parquet")
